"""Regular expressions of users, in RE2 syntax, which match in time linear in the text for every pattern.

Python's ``re`` can take years over thirty characters and holds the interpreter's lock meanwhile, which would stop the training. pyarrow,
which is installed with the recorder, contains RE2. See https://github.com/google/re2/wiki/Syntax.

Each call of pyarrow compiles the pattern again, which takes longer than a match: 50 µs, and milliseconds for a large pattern. Callers that know
their texts in advance state them (`expect`), and each pattern is then matched with all of them by one call.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence

_MAX_TEXTS = 200_000
_MAX_PATTERNS = 1000
MAX_PATTERN = 4096
"""Maximum length of a pattern in characters."""


def check_pattern(pattern: str) -> None:
    """Check that a pattern is valid.

    Raises:
        ValueError: It is too long, is not valid, or uses what RE2 does not support, such as lookahead and backreferences.
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"{len(pattern)} characters, more than the limit of {MAX_PATTERN}")
    try:
        _match(pattern, [""])
    except Exception as error:
        raise ValueError(str(error).split("\n", 1)[0][:200]) from error


class _Expected:
    """Texts that are matched soon, and for each pattern those of them that match. Thread-safe."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._texts: list[str] = []
        self._matching: dict[
            str, tuple[int, set[str]]
        ] = {}  # pattern → number of texts that were tried, those that match
        self._lock = threading.RLock()  # a signal handler may interrupt the thread that holds it, and match

    def add(self, texts: Iterable[str]) -> None:
        """Add texts. Beyond a limit, all earlier ones are forgotten."""
        with self._lock:
            for text in texts:
                if text not in self._places:
                    if len(self._texts) >= _MAX_TEXTS:
                        self._places, self._texts, self._matching = {}, [], {}
                    self._places[text] = len(self._texts)
                    self._texts.append(text)

    def match(self, pattern: str, text: str) -> bool | None:
        """Whether a pattern matches an expected text; None if the text is not expected."""
        with self._lock:
            place = self._places.get(text)
            if place is None:
                return None
            tried, matching = self._matching.get(pattern, (0, set()))
            if place >= tried:
                new = self._texts[tried:]
                matching.update(
                    text for text, matches in zip(new, _match(pattern, new), strict=True) if matches
                )
                if len(self._matching) >= _MAX_PATTERNS and pattern not in self._matching:
                    self._matching.clear()
                self._matching[pattern] = (len(self._texts), matching)
            return text in matching


_expected = _Expected()


def expect(texts: Iterable[str]) -> None:
    """State texts that `matches_from_start` will be called with, so that each pattern is compiled once for all of them."""
    _expected.add(texts)


def matches_from_start(pattern: str, text: str) -> bool:
    """Return whether a valid pattern matches a text from its start."""
    matches = _expected.match(pattern, text)
    return _matches_single(pattern, text) if matches is None else matches


@functools.lru_cache(maxsize=65536)
def _matches_single(pattern: str, text: str) -> bool:
    return _match(pattern, [text])[0]


def _match(pattern: str, texts: Sequence[str]) -> list[bool]:
    import pyarrow as pa  # imported on first use, because most configurations have no pattern
    import pyarrow.compute as pc

    matches: list[bool] = pc.match_substring_regex(
        pa.array(texts, pa.string()), f"^(?:{pattern})"
    ).to_pylist()
    return matches
