"""Which collections are due at a step: by their fixed cadence, or as the budget allows."""

from __future__ import annotations

import time

from watchstep.capture.budget import Budget, Clock
from watchstep.capture.config import CaptureConfig
from watchstep.capture.health import Health

_MOST_BAD_STEPS = 3


class Schedule:
    """Asked before anything is touched, told what measuring cost. On the training thread.

    Attributes:
        budget: None where there is none.
    """

    def __init__(self, config: CaptureConfig, health: Health, clock: Clock = time.perf_counter) -> None:
        self._cadences = config.collections
        self._health = health
        self._clock = clock
        self._demanded = -1
        self._bad_step = -2
        self._bad_steps = 0
        self._told = False
        adaptive = [name for name, cadence in config.collections.items() if cadence.every is None]
        self.budget: Budget | None = None
        if config.overhead_budget is not None:
            self.budget = Budget(adaptive, config.overhead_budget, config.allowance_seconds, clock)

    def due(self, collection: str, step: int) -> bool:
        """Whether a collection is measured at a step."""
        cadence = self._cadences.get(collection)
        if cadence is None:
            return False
        if step == self._demanded or step in cadence.steps:
            return True
        if self.budget is None or cadence.every is not None:
            return cadence.due(step)
        return cadence.within(step) and self.budget.due(collection, step)

    def demand(self, step: int) -> None:
        """Something is wrong at this step: measure everything that is recorded at all.

        Of bad steps in a row the first three; after that the budget decides again.
        """
        if step != self._bad_step:
            self._bad_steps = self._bad_steps + 1 if step == self._bad_step + 1 else 1
            self._bad_step = step
        if self._bad_steps <= _MOST_BAD_STEPS:
            self._demanded = step

    def now(self) -> float:
        """Seconds of the clock by which costs are told."""
        return self._clock()

    def spent(self, collection: str, since: float) -> None:
        """Measuring a collection took from ``since`` until now."""
        if self.budget is not None:
            self.budget.spent(collection, self._clock() - since)

    def floor(self, seconds: float) -> None:
        """What a step costs whatever is measured."""
        if self.budget is None:
            return
        self.budget.floor(seconds)
        if not self._told and self.budget.floor_exceeds:
            self._told = True
            self._health.note(
                "budget", "the gate and the empty hooks alone cost more than the budget: steps are tiny"
            )
