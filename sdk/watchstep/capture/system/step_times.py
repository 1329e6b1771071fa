"""How long steps take, and how long they wait before they begin. On the training thread, for a clock's reading each."""

from __future__ import annotations

import time
from collections.abc import Callable

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
