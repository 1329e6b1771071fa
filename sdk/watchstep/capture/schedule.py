"""Which collections are due at a step: by their fixed cadence, or as the budget allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from watchstep.capture.budget import Budget
from watchstep.capture.cadence import Cadence
from watchstep.capture.collections import Collection
from watchstep.capture.config import CaptureConfig
from watchstep.capture.health import Health
from watchstep.tensors import Mode

_MOST_BAD_STEPS = 3
_STEPS_OF_CREDIT = 100
_BURST = 5
"""Steps that are measured whole from an onset on."""

_SPAN = 1000
_MOST_BURSTS = 4
"""Within so many steps …"""

_MOST_GREATER = 8
"""… and so many with those of onsets that are greater by `_GREATER` than all of them."""

_GREATER = 4.0


class Schedule:
    """Asked before anything is touched, told what measuring cost. On the training thread, but for `override`.

    Attributes:
        budget: None where there is none.
        bursts: how many have begun.
    """

    def __init__(self, config: CaptureConfig, health: Health) -> None:
        self._collections: Mapping[str, Collection] = config.chosen
        self._health = health
        self._clock = config.clock
        self._demanded = -1
        self._bad_step = -2
        self._bad_steps = 0
        self._told = False
        self.bursts = 0
        self._burst_end = -1
        self._bursts: list[tuple[int, float]] = []
        self._passes: dict[Mode, _Passes] = {}
        adaptive = [name for name, chosen in self._collections.items() if chosen.cadence.every is None]
        self.budget: Budget | None = None
        if config.overhead_budget is not None:
            self.budget = Budget(adaptive, config.overhead_budget, config.allowance_seconds, config.clock)

    def due(self, collections: Iterable[str], step: int, mode: Mode = "train") -> str | None:
        """Whether a tensor of some collections is measured at a step: the collection that is due, or None."""
        for name in collections:
            collection = self._collections.get(name)
            if collection is not None and self._is_due(name, collection, step, mode):
                return name
        return None

    def _is_due(self, name: str, collection: Collection, step: int, mode: Mode) -> bool:
        cadence = collection.in_mode(mode)
        if cadence is None:
            return False
        if mode != "train":
            return self._is_due_in_pass(cadence, mode)
        if step == self._demanded or step < self._burst_end or step in cadence.steps:
            return True
        if self.budget is None or cadence.every is not None:
            return cadence.due(step)
        return cadence.within(step) and self.budget.due(name, step)

    def _is_due_in_pass(self, cadence: Cadence, mode: Mode) -> bool:
        passes = self._passes.get(mode) or _Passes()
        if cadence.every is not None or self.budget is None:
            return cadence.due(max(0, passes.number))
        return (
            cadence.within(max(0, passes.number))
            and passes.first
            and (self.budget.affords_more or passes.on_credit)
        )

    def forward(self, mode: Mode, step: int) -> None:
        """A forward pass begins in another mode than train. Of those between two steps, only the first is adaptive."""
        held = self._passes.setdefault(mode, _Passes())
        held.number += 1
        held.first = held.step != step
        held.step = step
        if held.first:
            held.on_credit = step >= held.next_credit
            held.next_credit = step + _STEPS_OF_CREDIT if held.on_credit else held.next_credit

    def override(self, every: Mapping[str, int]) -> None:
        """Measure collections each so many steps from now on, as the service asks. Called from another thread."""
        self._collections = {
            name: replace(chosen, cadence=Cadence(every=every[name])) if name in every else chosen
            for name, chosen in self._collections.items()
        }

    def demand(self, step: int) -> None:
        """Something is wrong at this step: measure everything that is recorded at all.

        Of bad steps in a row the first three; after that the budget decides again.
        """
        if step != self._bad_step:
            self._bad_steps = self._bad_steps + 1 if step == self._bad_step + 1 else 1
            self._bad_step = step
        if self._bad_steps <= _MOST_BAD_STEPS:
            self._demanded = step

    def onset(self, step: int, excess: float) -> bool:
        """A loss has left its range: measure everything at this step and the next, if there is room for it.

        Four times in a thousand steps, after the first of them only while the budget's account is not overdrawn; and up to eight times where an
        onset is four times as great as those before. What is measured is taken off the allowance as ever: the budget holds.

        Args:
            step: of the run.
            excess: how far it is above the range, in a unit of its own.

        Returns:
            Whether a burst begins.
        """
        if step < self._burst_end:
            return False
        recent = self._bursts = [burst for burst in self._bursts if burst[0] > step - _SPAN]
        affords = self.budget is None or self.budget.affords_more or not recent
        is_greater = bool(recent) and excess >= _GREATER * max(size for _, size in recent)
        if not (affords and len(recent) < _MOST_BURSTS) and not (is_greater and len(recent) < _MOST_GREATER):
            self._health.count("unmeasured_onsets")
            return False
        self._bursts.append((step, excess))
        self.bursts += 1
        self._burst_end = step + _BURST
        self._health.count("measured_onsets")
        return True

    def now(self) -> float:
        """Seconds of the clock by which costs are told."""
        return self._clock()

    def spent(self, collection: str, since: float) -> None:
        """Measuring a collection took from ``since`` until now."""
        if self.budget is not None:
            self.budget.spent(collection, self._clock() - since)

    def asked(self, since: float) -> None:
        """What the program asked for besides, a snapshot, took from ``since`` until now."""
        if self.budget is not None:
            self.budget.asked(self._clock() - since)

    def floor(self, seconds: float) -> None:
        """What a step costs whatever is measured."""
        if self.budget is None:
            return
        self.budget.floor(seconds)
        if not self._told and self.budget.floor_exceeds:
            self._told = True
            self._health.note(
                "budget",
                "the gate and the empty hooks alone cost more than the budget: steps are tiny; measuring takes its allowance",
            )


class _Passes:
    """Forward passes of one mode: how many there were, less one, and whether this is the first since an update.

    Evaluations are rare, and their turn may come when the allowance is spent: every hundred steps one is on credit.
    """

    def __init__(self) -> None:
        self.number = -1
        self.step = -1
        self.first = True
        self.on_credit = True
        self.next_credit = 0
