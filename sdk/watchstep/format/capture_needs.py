"""What rules need the recorder to capture. A rule file states it at the start of a run, and the control document for rules that are attached later."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from watchstep.format.tensors import MODES, Mode

MAX_NEEDS = 200
"""Limit of the needs of a run. The first ones count."""

_MAX_WORDS = 100


@dataclass(frozen=True)
class CaptureNeed:
    """What one rule config needs.

    Attributes:
        rule: name of the rule config.
        collections: collections of its tensors.
        probes: additional figures, as `watchstep.capture.config.CaptureConfig.probes`.
        every: number of steps between full tensors of these collections; 0 if it needs statistics only.
        modes: modes of the full tensors; empty for all.
    """

    rule: str
    collections: tuple[str, ...]
    probes: tuple[str, ...] = ()
    every: int = 0
    modes: tuple[Mode, ...] = ()

    @classmethod
    def from_data(cls, data: Any) -> CaptureNeed:
        """Read the result of `dataclasses.asdict`.

        Raises:
            ValueError: The data has another form.
        """
        if not isinstance(data, dict):
            raise ValueError("a need is not a mapping")  # noqa: TRY004 - callers catch one type
        every, modes = data.get("every", 0), _words(data.get("modes", ()))
        if type(every) is not int or not 0 <= every < 2**31 or not set(modes) <= set(MODES):
            raise ValueError(f"a need has invalid steps or modes: {every!r}, {modes!r}"[:200])
        return cls(
            _words([data.get("rule", "")])[0],
            _words(data.get("collections", ())),
            _words(data.get("probes", ())),
            every,
            modes,  # type: ignore[arg-type]
        )


def encoded(needs: Iterable[CaptureNeed]) -> str:
    """Encode needs as the value of an environment variable; empty if there are none."""
    data = [{name: value for name, value in asdict(need).items() if value} for need in needs]
    return json.dumps(data, separators=(",", ":")) if data else ""


def decoded(text: str) -> tuple[CaptureNeed, ...]:
    """Decode the result of `encoded`.

    Raises:
        ValueError: The text has another form.
    """
    try:
        return needs_from_data(json.loads(text)) if text else ()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def needs_from_data(data: Any) -> tuple[CaptureNeed, ...]:
    """Read several needs.

    Raises:
        ValueError: The data has another form.
    """
    if not isinstance(data, list | tuple):
        raise ValueError("needs are not a list")  # noqa: TRY004 - callers catch one type
    return tuple(CaptureNeed.from_data(entry) for entry in data[:MAX_NEEDS])


def _words(data: Any) -> tuple[str, ...]:
    words = tuple(data) if isinstance(data, list | tuple) else ()
    if not all(isinstance(word, str) and len(word) <= 1000 for word in words) or len(words) > _MAX_WORDS:
        raise ValueError("a need has values that are not short words")
    return words
