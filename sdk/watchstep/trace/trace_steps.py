"""`watchstep.TraceSteps`: which steps of a recorded training are traced, and what is recorded of them. Loads no framework."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

from watchstep.errors import ConfigError
from watchstep.trace.operations import TraceMode

TRACE = "WATCHSTEP_TRACE"
"""Steps to trace, as in `TraceSteps.steps`, or ``explain:STEP`` for `TraceSteps.explaining`, if `Hook(trace=…)` does not set them."""

_EXPLAIN = re.compile(r"explain:([0-9]{1,18})")
_STEPS_BEFORE, _LEAST_EXPLAINED = 4, 2

_RANGE = re.compile(r"([0-9]{1,18})(?::([0-9]{1,18}))?")
_HINT = "use steps and ranges of steps with their last one, as '0:2,1000'"


@dataclass(frozen=True)
class TraceSteps:
    """Which training steps a hook traces. The traces are written to the run, as `watchstep.trace.saved_traces` lists them.

    Attributes:
        steps: steps and ranges of steps with their last one, as ``"100:103,5000"``.
        mode: what is recorded of each output, a `TraceMode` or its value, as ``"full_health"``.
        operations: as in `TraceConfig`.
        modules: as in `TraceConfig`.
        dtypes: as in `TraceConfig`.
        max_bytes: approximate memory of traces that are recorded and not yet written. Operations and steps beyond it are left out and
            counted.
        explained: a step whose unusual operations are printed after it, compared with the traced steps before it.
    """

    steps: str
    mode: TraceMode | str = TraceMode.CURT_HEALTH
    operations: str = ""
    modules: str = ""
    dtypes: tuple[str, ...] = ()
    max_bytes: int = 256 * 2**20
    explained: int | None = None
    ranges: tuple[tuple[int, int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the values; the names of dtypes are checked when PyTorch is loaded.

        Raises:
            ConfigError: a value is invalid.
        """
        object.__setattr__(self, "ranges", _ranges(self.steps))
        try:
            object.__setattr__(self, "mode", TraceMode(self.mode))
        except ValueError:
            raise ConfigError(
                f"TraceSteps(mode={self.mode!r})", f"use {', '.join(mode.value for mode in TraceMode)}"
            ) from None
        for name in ("operations", "modules"):
            try:
                re.compile(getattr(self, name))
            except (re.error, TypeError) as error:
                raise ConfigError(
                    f"TraceSteps({name}={getattr(self, name)!r}): {error}", "use a valid regular expression"
                ) from None
        if type(self.max_bytes) is not int or self.max_bytes < 1:
            raise ConfigError(f"TraceSteps(max_bytes={self.max_bytes!r})", "use a number of bytes from 1")

    @classmethod
    def explaining(cls, step: int) -> TraceSteps:
        """Return a configuration that traces a step and four steps before it, and prints what is unusual in it.

        Args:
            step: The step, at least 2, so that there are steps to compare it with.
        """
        if step < _LEAST_EXPLAINED:
            raise ConfigError(
                f"step {step} has too few steps before it to compare with",
                f"use a step from {_LEAST_EXPLAINED}",
            )
        return cls(f"{max(0, step - _STEPS_BEFORE)}:{step}", TraceMode.STATISTICS, explained=step)

    def chooses(self, step: int) -> bool:
        """Return whether a step is traced."""
        return any(first <= step <= last for first, last in self.ranges)


def _ranges(text: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(text, str):
        raise ConfigError(f"TraceSteps(steps={text!r})"[:200], _HINT)
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"TraceSteps(steps={text[:100]!r})", _HINT)
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise ConfigError(f"TraceSteps(steps={text[:100]!r}): {last} is before {first}", _HINT)
        ranges.append((first, last))
    return tuple(sorted(ranges))


def trace_steps_of(given: TraceSteps | str | None) -> TraceSteps | None:
    """Return which steps are traced, from the argument, or else from the environment; None for none. Raises `ConfigError`."""
    if isinstance(given, TraceSteps):
        return given
    if given is not None:
        return _parsed(given)
    text = os.environ.get(TRACE, "")
    try:
        return _parsed(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"{TRACE}={text[:100]!r}: {error.what}", error.hint) from None


def _parsed(text: str) -> TraceSteps:
    match = _EXPLAIN.fullmatch(text) if isinstance(text, str) else None
    return TraceSteps(text) if match is None else TraceSteps.explaining(int(match[1]))
