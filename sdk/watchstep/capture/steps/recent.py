"""Figures of the last steps, in memory until a failure or a stop asks for them: the flight recorder.

At most steps the budget pays for nothing, and a failure comes without a word of the steps before it. Where measuring is cheap, gradients and weights are measured at these
steps, too. Their rows are an object of their own, which readers read and no rule judges: a segment has all rows of a step of a rank, and these come later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from watchstep.capture.steps.record import FinishedStep, join
from watchstep.capture.tensors.snapshots import StoredFile
from watchstep.format.layout import FlightKey
from watchstep.format.segment import encode

RECENT_STEPS = 50
"""Number of steps that are kept."""

RECENT_SHARE = 0.003
"""Maximum cost, as a share of the program's time."""

_MAX_BYTES = 16 * 1024 * 1024
_MAX_WAITING = 4
"""Objects that wait for the store. Later ones are written once it answers: a training may have series of non-finite steps for as long as it is away."""

_MAX_INTERVAL = 5
"""Maximum number of steps between two measured ones. At a larger one nothing is kept: the longest gap of the default recording is twice that."""

_PAUSE = 100
"""Least number of steps without measuring after it was too expensive. It is larger until the tries take no more than `RECENT_SHARE` either."""

_COSTS = 5
"""Number of the last costs whose median counts: a process that is interrupted takes any time."""

_FEWEST_COSTS = 3
_FIRST_STEP = 3  # steps before it are measured completely


class RecentSteps:
    """Steps in memory, and the decision which steps are measured for it. Used on the training thread."""

    def __init__(
        self, worker: int, step_time: Callable[[], float | None], store: Callable[[StoredFile], None]
    ) -> None:
        """Start without steps.

        Args:
            worker: the rank.
            step_time: returns the usual seconds of a step of the program's own work; None if they are unknown, and nothing is measured.
            store: receives an object that is to be written.
        """
        self._worker = worker
        self._step_time = step_time
        self._store = store
        self._steps: deque[FinishedStep] = deque(maxlen=RECENT_STEPS)
        self._bytes = 0
        self._offered = 0  # by the training thread
        self._taken = 0  # by the thread that writes
        self._next = _FIRST_STEP
        self._measured_at = -1
        self._in_step = 0.0
        self._costs: deque[float] = deque(maxlen=_COSTS)

    def wants(self, step: int) -> bool:
        """Return whether a step is measured."""
        return step >= self._next or step == self._measured_at

    def spent(self, step: int, seconds: float) -> None:
        """Record the cost of measuring a step. It may be called several times in a step."""
        if step != self._measured_at:
            self._settle()
            self._measured_at, self._in_step = step, 0.0
            self._next = step + self._interval()
        self._in_step += seconds

    def add(self, finished: FinishedStep) -> None:
        """Keep the rows of a step. The oldest ones are dropped beyond `RECENT_STEPS` or 16 MiB."""
        if len(self._steps) == RECENT_STEPS:
            self._bytes -= self._steps.popleft().bytes
        self._steps.append(finished)
        self._bytes += finished.bytes
        while self._bytes > _MAX_BYTES:
            self._bytes -= self._steps.popleft().bytes

    def write(self, step: int) -> None:
        """Let the rows that are kept of the `RECENT_STEPS` steps up to a step be written, and forget them. They stay if too many objects wait."""
        if self._offered - self._taken >= _MAX_WAITING:
            return
        # A signal handler may interrupt this and take them, too.
        kept, self._steps, self._bytes = self._steps, deque(maxlen=RECENT_STEPS), 0
        steps = [finished for finished in kept if finished.step >= step - RECENT_STEPS]
        if steps:
            first, last = steps[0].step, steps[-1].step
            self._offered += 1
            self._store(
                StoredFile(
                    lambda attempt: FlightKey(attempt, self._worker, first, last).path,
                    lambda: self._encoded(steps),
                    "flights",
                )
            )

    def _encoded(self, steps: Sequence[FinishedStep]) -> NDArray[np.uint8]:
        self._taken += 1
        block = join([record for finished in steps for record in finished.records])
        block = replace(block, catalogue=tuple(info.bounded() for info in block.catalogue))
        return np.frombuffer(encode(block), np.uint8)

    def _settle(self) -> None:
        if self._measured_at >= 0:
            self._costs.append(self._in_step)

    def _interval(self) -> int:
        """Return the number of steps to the next measured one."""
        step_time = self._step_time()
        if not step_time:
            return _PAUSE
        if len(self._costs) < _FEWEST_COSTS:
            return 1
        allowance = RECENT_SHARE * step_time
        interval = max(1, math.ceil(sorted(self._costs)[len(self._costs) // 2] / allowance))
        if interval <= _MAX_INTERVAL:
            return interval
        pause = max(_PAUSE, math.ceil(sum(self._costs) / allowance))
        self._costs.clear()
        return pause
