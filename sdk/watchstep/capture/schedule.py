"""Which collections are due at a step: by their fixed cadence, or as the overhead budget allows.

The recorder times itself. Every step brings an allowance, a share of the time that the program's own work took; the cost
of measuring, writing and of the empty hooks is subtracted from it. A collection is measured when the saved allowance
pays for it, the one that has waited longest first. In the first hundred steps the allowance is ten times as large: that
is where most trainings go wrong. In steps so short that their share pays for nothing, each step brings a fixed allowance,
and the cost of the empty hooks is not subtracted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from watchstep.capture.config import Cadence, CaptureConfig, Collection
from watchstep.capture.health import RecorderHealth
from watchstep.format.tensors import Mode

DENSE_STEPS = 100
DENSE_FACTOR = 10.0
_FIRST_RECORDS = 3
"""Records of each collection that are made at the first steps whatever they cost, for rules that judge three in a row: a training that begins
with a poor initialization shows it at once."""
_MEMORY = 0.2  # weight of the newest value in running means
_MEMORY_OF_LESS = 0.5  # … of a cost below its mean: what comes between makes costs too high, never too low
_SPIKE = 4.0  # a cost is taken as at most so many times its mean: the process was interrupted, not slow
_LONG = 0.5  # seconds in one step after which a collection's measuring goes by its share within the step
_PATIENCE = 1.5  # allowance is saved up to so many times the dearest collection's cost

Clock = Callable[[], float]


@dataclass
class _Unit:
    """One collection that is measured as the budget allows."""

    name: str
    last: int = -1
    cost: float | None = None
    measured: int = 0
    measured_at: int = -1
    in_step: float = 0.0

    @property
    def is_cold(self) -> bool:
        """Whether fewer records than the first were made: libraries are loaded then, memory is taken; that says nothing of its cost.

        What all but the last of the first records cost is reported, and takes nothing off the allowance.
        """
        return self.measured < _FIRST_RECORDS

    def settle(self) -> None:
        """A step is over: take what measuring cost in it into the mean."""
        if self.in_step and not self.is_cold:
            old = self.cost
            counted = self.in_step if old is None else min(self.in_step, _SPIKE * old)
            weight = _MEMORY if old is None or counted > old else _MEMORY_OF_LESS
            self.cost = counted if old is None else old + weight * (counted - old)
        self.in_step = 0.0


class Budget:
    """Decides at the start of each step which collections it pays for. On the training thread, but for `written`.

    Attributes:
        share: of the program's own time.
        allowance: seconds that a step brings at least, besides what the empty hooks cost.
    """

    def __init__(
        self,
        collections: Sequence[str],
        share: float,
        allowance: float = 0.0,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.share = share
        self.allowance = allowance
        self._clock = clock
        self._units = {name: _Unit(name) for name in collections}
        self._step = -1
        self._due: frozenset[str] = frozenset()
        self._saved = 0.0
        self._spent = 0.0
        self._program = 0.0
        self._steps = 0
        self._step_time: float | None = None
        self._began = clock()
        self._spent_in_step = 0.0
        self._floor = 0.0
        self._floors = 0.0
        self._lock = threading.RLock()  # a signal's handler may close the hook
        self._written = 0.0

    def due(self, collection: str, step: int) -> bool:
        """Whether a collection is measured at a step; the first question of a step settles it for all."""
        if step != self._step:
            self._plan(step)
        return collection in self._due and not self._is_endless(self._units[collection])

    def spent(self, collection: str, seconds: float) -> None:
        """Measuring a collection took so long."""
        unit = self._units.get(collection)
        if unit is None:
            self.asked(
                seconds
            )  # its cadence is fixed: kept whatever it costs, and not at the others' expense
            return
        if self._step != unit.measured_at:
            unit.measured += 1
            unit.last = unit.measured_at = self._step
        unit.in_step += seconds
        if unit.is_cold:
            self.asked(seconds)
        else:
            counted = seconds if unit.cost is None else min(seconds, _SPIKE * unit.cost)
            self._take(counted)
            self.asked(seconds - counted)

    def asked(self, seconds: float) -> None:
        """What comes once, or is asked for besides, took so long: it is told, and takes nothing off the allowance."""
        self._spent += seconds
        self._spent_in_step += seconds

    def floor(self, seconds: float) -> None:
        """What every step costs whatever is measured: the gate and the empty hooks."""
        self._floors += seconds
        self._floor += _MEMORY * (min(seconds, _SPIKE * self._floor or seconds) - self._floor)
        self._take(min(seconds, _SPIKE * self._floor or seconds))

    def written(self, seconds: float) -> None:
        """The writer's thread used so much processor time."""
        with self._lock:
            self._written += seconds

    def as_data(self) -> dict[str, Any]:
        """The account, JSON-ready: what was spent, by what share, and how often each collection was measured."""
        steps = max(1, self._steps)
        return {
            "budget": self.share,
            "share": self._spent / self._program if self._program else 0.0,
            "spent_seconds": self._spent,
            "program_seconds": self._program,
            "floor_share": self._floors / self._program if self._program else 0.0,
            "every": {
                u.name: round(steps / u.measured, 1) if u.measured else None for u in self._units.values()
            },
            "last": {u.name: u.measured_at for u in self._units.values() if u.measured},
        }

    def shares(self) -> dict[str, Any]:
        """What recording costs so far and what it may, as shares of the program's time; from any thread."""
        program = self._program
        return {"budget": self.share, "share": self._spent / program if program else 0.0}

    @property
    def affords_more(self) -> bool:
        """Whether the account is not overdrawn: something that comes seldom may then be measured on credit."""
        return self._saved >= 0

    @property
    def floor_exceeds(self) -> bool:
        """Whether the gate and the empty hooks alone cost more than the budget, once the first steps are over."""
        if self._steps < DENSE_STEPS:
            return False
        return self._floors > self.share * self._program

    def _is_endless(self, unit: _Unit) -> bool:
        """Whether measuring goes on and on within one step: it is of very many passes, or nothing counts steps."""
        return unit.in_step > _LONG and unit.in_step > self.share * (self._clock() - self._began)

    def _take(self, seconds: float) -> None:
        self._spent += seconds
        self._saved -= seconds
        self._spent_in_step += seconds

    def _plan(self, step: int) -> None:
        self._close_step()
        for unit in self._units.values():
            unit.settle()
            if unit.name in self._due:
                unit.last = self._step  # also where there was nothing to measure: it has had its turn
        self._step = step
        if self._step_time is not None:
            factor = DENSE_FACTOR if self._steps < DENSE_STEPS else 1.0
            self._saved += max(factor * self.share * self._step_time, self.allowance + self._floor)
        dearest = max((unit.cost or 0.0 for unit in self._units.values()), default=0.0)
        self._saved = min(self._saved, _PATIENCE * dearest)
        left, due = self._saved, set()
        for unit in sorted(self._units.values(), key=lambda unit: unit.last):
            if unit.cost is not None and unit.cost > left:
                break  # it has waited longest: save up for it
            left -= unit.cost or 0.0
            due.add(unit.name)
        self._due = frozenset(due)

    def _close_step(self) -> None:
        """Take in how long the step that is over took, without the recorder's own time."""
        with self._lock:
            written, self._written = self._written, 0.0
        self._take(written)
        now = self._clock()
        own = max(0.0, now - self._began - (self._spent_in_step - written))
        self._began, self._spent_in_step = now, 0.0
        if self._step < 0:
            return
        self._steps += 1
        self._program += own
        if self._step_time is None:
            self._step_time = own
        else:
            self._step_time += _MEMORY * (min(own, _SPIKE * self._step_time) - self._step_time)


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

    def __init__(self, config: CaptureConfig, health: RecorderHealth) -> None:
        self._collections: Mapping[str, Collection] = config.chosen
        self._health = health
        self._clock = config.clock
        self._demanded = -1
        self._bad_step = -2
        self._bad_steps = 0
        self._floor_noted = False
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
        passes = self._passes.setdefault(mode, _Passes())
        passes.number += 1
        passes.first = passes.step != step
        passes.step = step
        if passes.first:
            passes.on_credit = step >= passes.next_credit
            passes.next_credit = step + _STEPS_OF_CREDIT if passes.on_credit else passes.next_credit

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
        if not self._floor_noted and self.budget.floor_exceeds:
            self._floor_noted = True
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
