"""Step times and data waits, measured on the training thread, and the system rows that are attached to a step.

Rows of the sampler are attached when a step is handed over, and carry its number. They are therefore never ahead of the
step's own rows or behind the rows that end it, and need no segment of their own.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from watchstep.format.statistics import StatisticsBatch, merge_rows
from watchstep.format.tensors import SYSTEM, TensorInfo

_MOST = 65_536  # samples that wait to be taken; of steps so short, some are enough


class StepTimes:
    """Told when an update ends and when a forward pass begins.

    Between the two a program fetches data, and does whatever else it does there: a checkpoint, `loss.item()`, which waits
    for a device.

    Attributes:
        first: when the first update ended, by the clock; None before.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.first: float | None = None
        self._clock = clock
        self._ended = 0.0
        self._wait: float | None = None
        self._is_between = False
        self._is_mixed = False
        self._seconds: list[float] = []
        self._waits: list[float] = []

    def finished(self) -> None:
        """An update has ended, and its step with it."""
        now = self._clock()
        if self.first is None:
            self.first = now
        elif not self._is_mixed and len(self._seconds) < _MOST and now > self._ended:
            seconds = now - self._ended
            self._seconds.append(seconds)
            if self._wait is not None:
                self._waits.append(self._wait / seconds)
        self._ended, self._wait = now, None
        self._is_between, self._is_mixed = True, False

    def forward(self) -> None:
        """A forward pass of training begins; the first one after an update ends the wait."""
        if self._is_between:
            self._is_between = False
            self._wait = self._clock() - self._ended

    def other_mode(self) -> None:
        """The program evaluates: how long this step takes says nothing of the others."""
        self._is_mixed = True

    def take(self) -> tuple[list[float], list[float]]:
        """Seconds of each step, and the shares that were waited; forgotten here. Called from another thread."""
        seconds, self._seconds = self._seconds, []
        waits, self._waits = self._waits, []
        return seconds, waits


@dataclass(frozen=True)
class Sampled:
    """Rows of samples.

    Attributes:
        tensors: what each row is of.
        statistics: of its samples.
        time_ns: when the last was taken, nanoseconds since the epoch.
    """

    tensors: tuple[TensorInfo, ...]
    statistics: StatisticsBatch
    time_ns: int

    def with_later(self, later: Sampled) -> Sampled:
        """Both as one."""
        place = {info: row for row, info in enumerate(dict.fromkeys((*self.tensors, *later.tensors)))}
        group = np.array([place[info] for info in (*self.tensors, *later.tensors)], np.intp)
        both = StatisticsBatch.concatenate([self.statistics, later.statistics])
        return Sampled(tuple(place), merge_rows(both, group, len(place)), later.time_ns)


class Waiting:
    """The rows that no step has taken along yet. One thread gives, one takes, and neither waits for the other."""

    def __init__(self) -> None:
        self._rows: deque[Sampled] = deque()

    def give(self, rows: Sampled) -> None:
        """Rows for the next step; merged with those that wait, so that there are never more for a step that lasts."""
        with contextlib.suppress(IndexError):  # none waits
            rows = self._rows.pop().with_later(rows)
        self._rows.append(rows)

    def take(self) -> Sampled | None:
        """What waits; None where nothing does."""
        if not self._rows:
            return None
        try:
            return self._rows.popleft()
        except IndexError:  # it was taken back a moment ago, and is given again
            return None


@dataclass(frozen=True)
class Alongside:
    """Both ways.

    Attributes:
        times: from the training thread.
        rows: to it.
    """

    times: StepTimes = field(default_factory=StepTimes)
    rows: Waiting = field(default_factory=Waiting)


def info_of(name: str) -> TensorInfo:
    """What is known of a figure of the system."""
    return TensorInfo(name, (SYSTEM,), "system", dtype="float64")
