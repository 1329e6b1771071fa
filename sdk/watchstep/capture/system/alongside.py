"""What passes between the sampler and the training thread: how long steps take, and rows that go along with a step.

Rows are taken along when a step is handed over, and carry its number. So they are never ahead of a step's own rows, nor
behind those that say that it is over, and they need no segment of their own.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from watchstep.capture.system.step_times import StepTimes
from watchstep.statistics import StatisticsBatch, merge_rows
from watchstep.tensors import SYSTEM, TensorInfo


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
