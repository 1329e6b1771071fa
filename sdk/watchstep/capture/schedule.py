"""Which collections are due at a step: by a fixed cadence, or as the overhead budget allows.

The recorder measures its own time. Every step adds an allowance, a share of the time of the program's own work; the cost
of measuring, of writing (up to four fifths of the allowance) and of the empty hooks is subtracted from it. A collection is measured when the saved allowance
pays for it, starting with the one that has waited longest. In the first hundred steps the allowance is four times as large, because
most faults show there. If steps are so short that their share pays for nothing, each step adds a fixed allowance,
and the cost of the empty hooks is not subtracted.

Whatever the allowance pays for, each collection is measured at least every `LONGEST_GAP` steps, and less often later, as long as measuring
takes at most `FLOOR_FACTOR` times the budget. Otherwise a program whose fixed cost is above its budget would have no data.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from watchstep.capture.config import Cadence, CaptureConfig, Collection
from watchstep.capture.health import RecorderHealth
from watchstep.format.tensors import Mode

DENSE_STEPS = 100
DENSE_FACTOR = 4.0
LONGEST_GAP = 10
"""Steps between two records of a collection, at most, up to step `EARLY_STEPS`."""

EARLY_STEPS = 1000
LATE_GAP = 50
LATE_SECONDS = 10.0
"""After `EARLY_STEPS`: `LATE_GAP` steps or so many seconds, whichever is longer."""

FLOOR_FACTOR = 3.0
"""Maximum cost of measuring for the longest gap, as a multiple of the budget. If it would take more, the gap is longer."""

OBSERVED_STEPS = 20
"""Number of first steps in which all calls of modules are observed, whatever that costs."""

SHORT_STEP = 0.005
"""Seconds of a step below which there is no longest gap: the fixed allowance alone decides."""

_FIRST_RECORDS = 3
"""Number of records of each collection at the first steps, whatever they cost, for rules that evaluate three in a row: a training with a
poor initialization shows it at once."""
_WEIGHT = 0.2  # weight of the newest value in running means
_WEIGHT_OF_LESS = 0.5  # … of a cost below its mean: interruptions make costs too high, never too low
_SPIKE = (
    4.0  # maximum multiple of its mean that a cost counts as: more means that the process was interrupted
)
_LONG = (
    0.5  # seconds in one step after which a collection's measuring is limited by its share within the step
)
_WRITER_SHARE = 0.8
"""Maximum share of the allowance that pays for the writer. Its cost hardly depends on what is measured: of short steps, whose segments are
written every second, it takes more than the whole budget in the first minute, and nothing would be measured then."""
_MAX_SAVED = 1.5  # maximum saved allowance, as a multiple of the most expensive collection's cost

Clock = Callable[[], float]


class OwnWork(Protocol):
    """Time of the recorder on the training thread.

    Attributes:
        depth: number of the recorder's calls in progress; 0 in the program's own code.
    """

    depth: int

    def so_far(self) -> float:
        """Return the time in all calls so far, including the one in progress."""
        ...


@dataclass
class _Unit:
    """One collection with an adaptive cadence."""

    name: str
    last: int = -1
    cost: float | None = None
    measured: int = 0
    measured_at: int = -1
    in_step: float = 0.0

    @property
    def is_cold(self) -> bool:
        """Whether it has few records: libraries are loaded and memory is allocated then, so the cost is not representative.

        The cost of all but the last of the first records is reported, but not subtracted from the allowance.
        """
        return self.measured < _FIRST_RECORDS

    def settle(self) -> None:
        """End a step: update the mean cost."""
        if self.in_step and not self.is_cold:
            previous = self.cost
            counted = self.in_step if previous is None else min(self.in_step, _SPIKE * previous)
            weight = _WEIGHT if previous is None or counted > previous else _WEIGHT_OF_LESS
            self.cost = counted if previous is None else previous + weight * (counted - previous)
        self.in_step = 0.0


def _last_measured(unit: _Unit) -> int:
    return unit.last


_MARK_SECONDS, _MARKS = 30.0, 10
"""Interval and number of the marks from which the cost of the last minutes follows."""


class Budget:
    """Decides at the start of each step which collections to measure. Used on the training thread, except for `written`.

    Attributes:
        share: share of the program's own time.
        allowance: minimum seconds that a step adds, in addition to the cost of the empty hooks.
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
        self._waiting = list(self._units.values())  # by their last record
        self._measured: dict[str, _Unit] = {}  # in this step
        self._costs = self._highest_cost = 0.0
        self._step = -1
        self._due: frozenset[str] = frozenset()
        self._saved = 0.0
        self._owed = 0.0  # seconds of the writer that are not subtracted from the allowance yet
        self._spent = 0.0
        self._program = 0.0
        self._steps = 0
        self._step_time: float | None = None
        self._began = clock()
        # Time, seconds of the program and seconds spent, at intervals; the first one is some minutes ago.
        self._marks = deque([(self._began, 0.0, 0.0)], maxlen=_MARKS)
        self._spent_in_step = 0.0
        self._own_work: OwnWork | None = None
        self._own_seconds = 0.0
        self._measuring = 0.0  # seconds within the recorder's calls that were reported otherwise
        self._dispatching = 0.0
        self._floor = 0.0
        self._floors = 0.0
        self._lock = threading.RLock()  # a signal's handler may close the hook
        self._written = 0.0

    def planned(self, step: int) -> frozenset[str]:
        """Return the collections that are measured at a step, unless that is endless. The first call for a step decides."""
        if step != self._step:
            self._plan(step)
        return self._due

    def spent(self, collection: str, seconds: float) -> None:
        """Record the seconds that measuring a collection took."""
        unit = self._units.get(collection)
        if unit is None:
            self.report_extra(
                seconds
            )  # a fixed cadence is kept whatever it costs, without reducing other collections
            return
        if self._step != unit.measured_at:
            unit.measured += 1
            unit.last = unit.measured_at = self._step
        unit.in_step += seconds
        self._measured[collection] = unit
        if unit.is_cold:
            self.report_extra(seconds)
        else:
            counted = seconds if unit.cost is None else min(seconds, _SPIKE * unit.cost)
            self._take(counted)
            self.report_extra(seconds - counted)

    def report_extra(self, seconds: float) -> None:
        """Record seconds of unique or requested work. They are reported, but not subtracted from the allowance."""
        self._spent += seconds
        self._spent_in_step += seconds

    def measure_floor(self, own_work: OwnWork) -> None:
        """Take the fixed cost of each step from now on from the recorder's own calls: their time that was not reported otherwise.

        What the call in progress has done so far is the start of the recording, and belongs to no step.
        """
        self._own_work, self._own_seconds = own_work, own_work.so_far()

    def reported(self, seconds: float) -> None:
        """Note that seconds were reported as measuring or as extra, so that they are no part of the fixed cost."""
        if self._own_work is not None and self._own_work.depth:
            self._measuring += seconds

    def dispatched(self, seconds: float) -> None:
        """Record the estimated time that a framework takes for calling the recorder in this step. It is part of the fixed cost."""
        self._dispatching += seconds

    def _take_floor(self) -> None:
        """Record the fixed cost of the last step."""
        measuring, self._measuring = self._measuring, 0.0
        dispatching, self._dispatching = self._dispatching, 0.0
        own = 0.0
        if self._own_work is not None:
            before, self._own_seconds = self._own_seconds, self._own_work.so_far()
            own = max(0.0, self._own_seconds - before - measuring)
        if own or dispatching:
            self.floor(own + dispatching)

    def floor(self, seconds: float) -> None:
        """Record the fixed cost of a step: the gate and the empty hooks."""
        self._floors += seconds
        self._floor += _WEIGHT * (min(seconds, _SPIKE * self._floor or seconds) - self._floor)
        self._take(min(seconds, _SPIKE * self._floor or seconds))

    def written(self, seconds: float) -> None:
        """Record processor seconds of the writer's thread."""
        with self._lock:
            self._written += seconds

    def as_data(self) -> dict[str, Any]:
        """The account, JSON-ready: seconds spent, their share, and how often each collection was measured."""
        steps = max(1, self._steps)
        return {
            "budget": self.share,
            "share": self._spent / self._program if self._program else 0.0,
            "spent_seconds": self._spent,
            "program_seconds": self._program,
            "floor_share": self._floors / self._program if self._program else 0.0,
            "every": {
                unit.name: round(steps / unit.measured, 1) if unit.measured else None
                for unit in self._units.values()
            },
            "last": {unit.name: unit.measured_at for unit in self._units.values() if unit.measured},
        }

    def shares(self) -> dict[str, Any]:
        """Return the cost of recording and the budget, as shares of the program's time: since the start, and in the last minutes. Thread-safe."""
        program, spent = self._program, self._spent
        _, program_before, spent_before = self._marks[0]
        recent = program - program_before
        return {
            "budget": self.share,
            "share": spent / program if program else 0.0,
            "recent_share": (spent - spent_before) / recent if recent else None,
            "steps": self._steps,
        }

    @property
    def step_time(self) -> float | None:
        """The usual seconds of a step of the program's own work; None before the first one has ended."""
        return self._step_time

    @property
    def affords_more(self) -> bool:
        """Whether the account is not overdrawn, so that something rare may be measured on credit."""
        return self._saved >= 0

    @property
    def gap(self) -> float:
        """Maximum number of steps between two records of a collection at this step; infinite if steps are short."""
        if self._step_time is None or self._step_time < SHORT_STEP:
            return math.inf
        early = self._steps < EARLY_STEPS
        return max(
            LONGEST_GAP if early else max(LATE_GAP, LATE_SECONDS / self._step_time), self._cheapest_gap()
        )

    def _cheapest_gap(self) -> float:
        """Return the number of steps between two records of all collections for which measuring takes `FLOOR_FACTOR` times the budget."""
        room = FLOOR_FACTOR * self.share * (self._step_time or 0.0)
        return self._costs / room if room > 0 else math.inf

    @property
    def lacks_data(self) -> bool:
        """Whether collections are measured less often than every `LONGEST_GAP` steps because that would cost too much, after the first steps."""
        if self._steps < DENSE_STEPS or self._step_time is None or self._step_time < SHORT_STEP:
            return False
        return self._cheapest_gap() > (LONGEST_GAP if self._steps < EARLY_STEPS else LATE_GAP)

    @property
    def floor_exceeds(self) -> bool:
        """Whether the gate and the empty hooks alone exceed the budget, after the first steps."""
        if self._steps < DENSE_STEPS:
            return False
        return self._floors > self.share * self._program

    @property
    def is_overloaded(self) -> bool:
        """Whether the fixed cost of steps is above `FLOOR_FACTOR` times the budget, after the first steps."""
        return self._steps >= OBSERVED_STEPS and self._floors > FLOOR_FACTOR * self.share * self._program

    def is_endless(self, collection: str) -> bool:
        """Whether measuring a collection within one step takes very long: it has very many passes, or nothing counts steps."""
        unit = self._units[collection]
        return unit.in_step > _LONG and unit.in_step > self.share * (self._clock() - self._began)

    def _take(self, seconds: float) -> None:
        self._spent += seconds
        self._saved -= seconds
        self._spent_in_step += seconds

    def _plan(self, step: int) -> None:
        self._close_step()
        units = self._units
        for name in self._due:
            units[name].last = self._step  # even if there was nothing to measure
        if self._measured:
            self._settle()
        self._step = step
        if self._step_time is not None:
            factor = DENSE_FACTOR if self._steps < DENSE_STEPS else 1.0
            added = max(factor * self.share * self._step_time, self.allowance + self._floor)
            # The fixed cost is subtracted anyway, so that the writer would take the rest of the allowance from measuring.
            paid = min(self._owed, _WRITER_SHARE * max(self.allowance, added - self._floor))
            self._owed -= paid
            self._saved += added - paid
        # What the longest gap requires beyond the allowance is not repaid for long.
        most = _MAX_SAVED * self._highest_cost
        self._saved = max(-most, min(self._saved, most))
        if self._measured or self._due:
            self._waiting.sort(key=_last_measured)
        self._measured.clear()
        gap = self.gap
        # Collections that are nearly as old come along, so that the rows of a step belong together.
        is_late = bool(self._waiting) and step - self._waiting[0].last >= gap
        due = {unit.name for unit in self._waiting if step - unit.last >= gap / 2} if is_late else set()
        remaining = self._saved
        for unit in self._waiting:
            if unit.cost is not None and unit.cost > remaining:
                break  # save up for the one that has waited longest
            remaining -= unit.cost or 0.0
            due.add(unit.name)
        self._due = frozenset(due)

    def _settle(self) -> None:
        """End a step in which collections were measured."""
        for unit in self._measured.values():
            unit.settle()
        costs = [unit.cost or 0.0 for unit in self._units.values()]
        self._costs, self._highest_cost = sum(costs), max(costs)

    def _close_step(self) -> None:
        """Record the duration of the last step, without the recorder's own time."""
        self._take_floor()
        with self._lock:
            written, self._written = self._written, 0.0
        self.report_extra(written)
        self._owed += written
        now = self._clock()
        program_time = max(0.0, now - self._began - (self._spent_in_step - written))
        self._began, self._spent_in_step = now, 0.0
        if self._step < 0:
            return
        self._steps += 1
        self._program += program_time
        if now - self._marks[-1][0] >= _MARK_SECONDS:
            self._marks.append((now, self._program, self._spent))
        if self._step_time is None or self._steps <= _FIRST_RECORDS:
            # The recorder's own first work may take all of the first step: no multiple of that is a limit.
            self._step_time = program_time
        else:
            self._step_time += _WEIGHT * (min(program_time, _SPIKE * self._step_time) - self._step_time)


_MAX_BAD_STEPS = 3
_MAX_BAD_SERIES = 8
"""Series of bad steps that are measured whatever they cost. Later ones are if the budget's account is not overdrawn."""

_CREDIT_INTERVAL = 100
_BURST_STEPS = 5
"""Number of steps that are measured completely from an onset on."""

_BURST_WINDOW = 1000
_MAX_BURSTS = 4
"""Maximum number of bursts within `_BURST_WINDOW` steps."""

_MAX_GREATER_BURSTS = 8
"""Maximum number of bursts including those of onsets that exceed all earlier ones by a factor of `_GREATER`."""

_GREATER = 4.0


class Schedule:
    """Decides what is measured, and receives the cost of measuring. Used on the training thread, except for `override`.

    Attributes:
        budget: the budget; None if there is none.
        bursts: number of bursts that have begun.
    """

    def __init__(self, config: CaptureConfig, health: RecorderHealth) -> None:
        self._collections: Mapping[str, Collection] = config.chosen
        self._health = health
        self._clock = config.clock
        self._demanded = -1
        self._bad_step = -2
        self._bad_steps = 0
        self._bad_series = 0
        self._affords_bad_series = True
        self._floor_noted = self._gap_noted = False
        self._nothing = frozenset[str]()
        self._decided, self._due, self._by_budget = -1, self._nothing, self._nothing
        self.bursts = 0
        self._burst_end = -1
        self._bursts: list[tuple[int, float]] = []
        self._passes: dict[Mode, _Passes] = {}
        adaptive = [
            name
            for name, chosen in self._collections.items()
            if chosen.cadence is not None and chosen.cadence.every is None
        ]
        self.budget: Budget | None = None
        if config.overhead_budget is not None:
            self.budget = Budget(adaptive, config.overhead_budget, config.allowance_seconds, config.clock)
        self._find_cadences()

    def due(self, collections: Iterable[str], step: int, mode: Mode = "train") -> str | None:
        """Return which of some collections is due at a step; None if none is."""
        if mode != "train":
            return next((name for name in collections if self._is_due_in_pass(name, mode)), None)
        if step != self._decided:
            self._decide(step)
        if self._due:
            for name in collections:
                if name in self._due and not (name in self._by_budget and self._is_endless(name)):
                    return name
        return None

    def _is_endless(self, name: str) -> bool:
        return self.budget is not None and self.budget.is_endless(name)

    def any_due(self, collections: Iterable[str], step: int) -> bool:
        """Return whether any of some collections is due at a step in mode train. At most steps none is, and no other query is needed."""
        if step != self._decided:
            self._decide(step)
        return bool(self._due) and not self._due.isdisjoint(collections)

    def _decide(self, step: int) -> None:
        """Find what is due at a step in mode train."""
        self._decided = step  # first, because another thread may change cadences meanwhile
        planned = self._nothing if self.budget is None else self.budget.planned(step)
        if step == self._demanded or step < self._burst_end:
            self._due, self._by_budget = frozenset((*self._fixed, *self._adaptive)), self._nothing
            return
        fixed = {name for name, cadence in self._fixed.items() if cadence.due(step)}
        fixed.update(name for name, cadence in self._adaptive.items() if step in cadence.steps)
        by_budget = {
            name for name in planned if name in self._adaptive and self._adaptive[name].is_within(step)
        }
        self._due, self._by_budget = frozenset(fixed | by_budget), frozenset(by_budget - fixed)

    def is_sampled(self, collection: str, step: int) -> bool:
        """Whether a collection that is due at a step in mode train is due by the budget alone, so that one forward pass of several is enough."""
        cadence = self._collections[collection].cadence
        if self.budget is None or cadence is None or cadence.every is not None:
            return False
        return step != self._demanded and step >= self._burst_end and step not in cadence.steps

    def records(self, collection: str, mode: Mode) -> bool:
        """Whether statistics of a collection are recorded in a mode, at some steps."""
        chosen = self._collections.get(collection)
        return chosen is not None and chosen.in_mode(mode) is not None

    def is_adaptive(self, collections: Iterable[str], mode: Mode) -> bool:
        """Whether the budget alone decides when some collections are measured in a mode other than train: in the first pass after a step, if at all."""
        chosen = [self._collections[name].in_mode(mode) for name in collections if name in self._collections]
        return self.budget is not None and all(each is None or each.every is None for each in chosen)

    def _is_due_in_pass(self, name: str, mode: Mode) -> bool:
        collection = self._collections.get(name)
        cadence = None if collection is None else collection.in_mode(mode)
        if cadence is None:
            return False
        passes = self._passes.get(mode) or _Passes()
        if cadence.every is not None or self.budget is None:
            return cadence.due(max(0, passes.number))
        return (
            cadence.is_within(max(0, passes.number))
            and passes.first
            and (self.budget.affords_more or passes.on_credit)
        )

    def forward(self, mode: Mode, step: int) -> None:
        """Begin a forward pass in a mode other than train. Between two steps, only the first pass is adaptive."""
        passes = self._passes.setdefault(mode, _Passes())
        passes.number += 1
        passes.first = passes.step != step
        passes.step = step
        if passes.first:
            passes.on_credit = step >= passes.next_credit
            passes.next_credit = step + _CREDIT_INTERVAL if passes.on_credit else passes.next_credit

    def pass_number(self, mode: Mode) -> int | None:
        """Return the number of the current forward pass in a mode other than train, from 0; None before the first one."""
        passes = self._passes.get(mode)
        return None if passes is None else passes.number

    def override(self, every: Mapping[str, int]) -> None:
        """Set fixed cadences of collections, as the service requests. Called from another thread."""
        self._collections = {
            name: replace(chosen, cadence=Cadence(every=every[name])) if name in every else chosen
            for name, chosen in self._collections.items()
        }
        self._find_cadences()

    def _find_cadences(self) -> None:
        """Find the cadences in mode train: those that the budget decides, and the others."""
        modes = {name: chosen.in_mode("train") for name, chosen in self._collections.items()}
        cadences = {name: cadence for name, cadence in modes.items() if cadence is not None}
        self._adaptive = {
            name: cadence
            for name, cadence in cadences.items()
            if self.budget is not None and cadence.every is None
        }
        self._fixed = {name: cadence for name, cadence in cadences.items() if name not in self._adaptive}
        self._decided = -1

    def demand(self, step: int) -> bool:
        """Measure everything at a bad step, if limits permit.

        In a series of bad steps, this applies to the first three; after that the budget decides again. A training that survives its bad steps may
        have any number of series: those after the first eight count only while the budget's account is not overdrawn.

        Returns:
            Whether everything is measured.
        """
        if step > self._bad_step:
            if step == self._bad_step + 1:
                self._bad_steps += 1
            else:
                self._bad_steps = 1
                self._bad_series += 1
                affords = self.budget is None or self.budget.affords_more
                self._affords_bad_series = self._bad_series <= _MAX_BAD_SERIES or affords
            self._bad_step = step
            if not self._affords_bad_series:
                self._health.count("unmeasured_bad_steps")
        is_demanded = self._bad_steps <= _MAX_BAD_STEPS and self._affords_bad_series
        if is_demanded:
            self._demanded, self._decided = step, -1
        return is_demanded

    def onset(self, step: int, excess: float) -> bool:
        """Measure everything at this step and the next ones because a loss has left its range, if limits permit.

        Limits are four bursts in a thousand steps, after the first of them only while the budget's account is not overdrawn; and up to
        eight if an onset is four times as great as the earlier ones. The cost is subtracted from the allowance as usual: the budget holds.

        Args:
            step: the step.
            excess: how far the loss is above the range, in units of `LossRange.excess`.

        Returns:
            Whether a burst begins.
        """
        if step < self._burst_end:
            return False
        recent = self._bursts = [burst for burst in self._bursts if burst[0] > step - _BURST_WINDOW]
        affords = self.budget is None or self.budget.affords_more or not recent
        is_greater = bool(recent) and excess >= _GREATER * max(size for _, size in recent)
        if not (affords and len(recent) < _MAX_BURSTS) and not (
            is_greater and len(recent) < _MAX_GREATER_BURSTS
        ):
            self._health.count("unmeasured_onsets")
            return False
        self._bursts.append((step, excess))
        self.bursts += 1
        self._burst_end, self._decided = step + _BURST_STEPS, -1
        self._health.count("measured_onsets")
        return True

    def now(self) -> float:
        """Return the seconds of the clock that measures costs."""
        return self._clock()

    def spent(self, collection: str, since: float) -> None:
        """Record that measuring a collection took from ``since`` until now."""
        if self.budget is not None:
            seconds = self._clock() - since
            self.budget.reported(seconds)
            self.budget.spent(collection, seconds)

    def report_extra(self, since: float) -> None:
        """Record that requested work, such as a snapshot, took from ``since`` until now."""
        if self.budget is not None:
            seconds = self._clock() - since
            self.budget.reported(seconds)
            self.budget.report_extra(seconds)

    def measure_floor(self, own_work: OwnWork) -> None:
        """Measure the fixed cost of steps, unless the program has configured a clock of its own, which measures something else."""
        if self.budget is not None and self._clock is time.perf_counter:
            self.budget.measure_floor(own_work)

    def dispatched(self, seconds: float) -> None:
        """Record the estimated time that a framework takes for calling the recorder, as a part of the fixed cost of the step."""
        if self.budget is not None:
            self.budget.dispatched(seconds)

    @property
    def is_overloaded(self) -> bool:
        """Whether there is a budget, and the fixed cost of steps is far above it."""
        return self.budget is not None and self.budget.is_overloaded

    def check_floor(self) -> None:
        """Note in health if the fixed cost of steps exceeds the budget. Called at each step."""
        if self.budget is None:
            return
        if not self._floor_noted and self.budget.floor_exceeds:
            self._floor_noted = True
            self._health.note(
                "budget",
                "the gate and the empty hooks alone exceed the budget; measuring uses its fixed allowance",
            )
        if not self._gap_noted and self.budget.lacks_data:
            self._gap_noted = True
            self._health.note(
                "gaps",
                f"tensors are measured less often than every {LONGEST_GAP} steps, because that would take more than "
                f"{FLOOR_FACTOR * self.budget.share:.1%} of the program's time; leave out collections, or raise overhead_budget",
            )


class _Passes:
    """Forward passes of one mode: their number minus one, and whether this is the first since an update.

    Evaluations are rare, and may occur when the allowance is spent: every hundred steps one is measured on credit.
    """

    def __init__(self) -> None:
        self.number = -1
        self.step = -1
        self.first = True
        self.on_credit = True
        self.next_credit = 0
