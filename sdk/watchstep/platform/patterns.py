"""Regular expressions of users, in RE2 syntax, which match in time linear in the text for every pattern.

Python's ``re`` can take years over thirty characters and holds the interpreter's lock meanwhile, which would stop the training. pyarrow,
which is installed with the recorder, contains RE2. See https://github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import functools


def check_pattern(pattern: str) -> None:
    """Check that a pattern is valid.

    Raises:
        ValueError: It is not, or it uses what RE2 does not support, such as lookahead and backreferences.
    """
    try:
        _match(pattern, "")
    except Exception as error:
        raise ValueError(str(error).split("\n", 1)[0][:200]) from error


@functools.lru_cache(maxsize=65536)
def matches_from_start(pattern: str, text: str) -> bool:
    """Return whether a valid pattern matches a text from its start."""
    return _match(pattern, text)


def _match(pattern: str, text: str) -> bool:
    import pyarrow as pa  # imported on first use, because most configurations have no pattern
    import pyarrow.compute as pc

    return bool(pc.match_substring_regex(pa.scalar(text), f"^(?:{pattern})").as_py())
