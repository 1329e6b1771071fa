"""How long the SQL and Python rules of a run may take together in one evaluation.

A rule of a user may take seconds for each step, and an evaluation may judge hundreds of steps. Without a common limit one run
keeps a worker busy for minutes, and the runs of others wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from watchstep.errors import RuleError

_now = time.monotonic


@dataclass
class RuleTime:
    """Not thread-safe: one evaluation judges its rules one after the other.

    Attributes:
        limit: seconds.
        spent: seconds that rules have taken so far.
    """

    limit: float
    spent: float = 0.0
    _started: float | None = field(default=None, repr=False)

    @property
    def left(self) -> float:
        """Seconds that are left, also while a rule is judging; below zero once the limit is passed."""
        running = 0.0 if self._started is None else _now() - self._started
        return self.limit - self.spent - running

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Count the time of the ``with`` block."""
        self._started = _now()
        try:
            yield
        finally:
            self.spent += _now() - self._started
            self._started = None


_current: ContextVar[RuleTime | None] = ContextVar("_current", default=None)


@contextmanager
def limited_rule_time(seconds: float) -> Iterator[RuleTime]:
    """In the ``with`` block, SQL and Python rules together may take so many seconds."""
    rule_time = RuleTime(seconds)
    token = _current.set(rule_time)
    try:
        yield rule_time
    finally:
        _current.reset(token)


@contextmanager
def rule_time_charged() -> Iterator[None]:
    """Count the time of the ``with`` block, where there is a limit."""
    rule_time = _current.get()
    if rule_time is None:
        yield
    else:
        with rule_time.charged():
            yield


def rule_time_left() -> float:
    """Seconds that are left; infinity where there is no limit."""
    rule_time = _current.get()
    return math.inf if rule_time is None else rule_time.left


def out_of_time(called: str) -> RuleError:
    """The error of a rule that is not judged, or not to the end, because the limit is reached."""
    rule_time = _current.get()
    limit = 0.0 if rule_time is None else rule_time.limit
    return RuleError(
        f"{called}: the SQL and Python rules of the run took over {limit:g} s in one evaluation",
        "make the rules faster, or raise WATCHSTEP_RULE_SECONDS",
    )
