"""Alerts: from the streaks of a rule config's series to pending, firing and resolved.

An alert belongs to one rule config on one attempt of a run::

                      a series has findings
    ┌──────────┐ ───────────────────────────────▶ ┌─────────┐
    │ INACTIVE │                                  │ PENDING │ ◀─────────────────────┐
    └──────────┘ ◀─────────────────────────────── └────┬────┘                       │
                      no series has findings           │ findings for              │ a series
                                                       │ ``for`` long              │ has findings
                                                       ▼                           │
              a likelier cause    ┌────────────▶ ┌────────┐                   ┌────┴─────┐
              becomes known       │              │ FIRING │ ─────────────────▶│ RESOLVED │
              (revised)           └───────────── └────────┘  every series     └──────────┘
                                                             that fires was clean
                                                             for ``keep_firing``

An alert without ``for`` goes through PENDING to FIRING at the same step.

**Two clocks.** Rows of several workers arrive out of step. An alert fires as soon as rows make it fire, without waiting for other
workers. Everything else waits for the *watermark*: the last step that all live workers passed. Changes of series are queued in
``waiting`` and applied step by step when the watermark passes them. The result is therefore what it would be if all rows arrived in
order, one step at a time. If later rows show that the alert fired at an earlier step, or for a likelier cause, it is *revised*.

**Late rows.** Rows of a step behind the watermark (of a worker that was no longer waited for) take effect when they arrive. They do not
start a new episode if they belong to a closed one: neither at its own steps, nor at later steps that the watermark had passed when the
rows arrived. Later findings of the same series do.

**Bounded queue.** If one worker stands still while many series change, the queue is bounded by `MOST_WAITING`: its earliest steps are
applied as if the watermark had passed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from watchstep_rules.config.rule_config import Timing
from watchstep_rules.engine.streaks import NONE, Change, ClockTick, JudgedRows, Known, Streak, Streaks, follow
from watchstep_rules.rule import Finding, Likelihood, likelihood, steps_of, taken


class Phase(str, Enum):
    """Where an alert stands."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class FiringSpan(NamedTuple):
    """Steps at which an alert fired: from the first, until one that is not among them; None while it fires."""

    first: int
    until: int | None


class Quiet(NamedTuple):
    """Of an alert that fires and nobody is told of: which rule config inhibits it, and a step at which one does."""

    by: str
    step: int


class Mark(NamedTuple):
    """A step at which a series comes to be bad or clean, or has been so for long enough."""

    step: int
    series: str
    bad: bool
    enough: bool


class LikelyCause(NamedTuple):
    """What may have made an alert fire at the finding's step: the likeliest of those that could, and its streak."""

    finding: Finding
    since: Streak


class AlertMemory(BaseModel):
    """What is kept of an alert between blocks.

    A series is a tensor@worker/mode. Streaks are of rows as they came, up to the newest; what follows from them for the alert
    waits until their step is sealed.

    Attributes:
        phase: where it stands, as it was said; it may fire before the step is sealed at which it does.
        finding: that of the likeliest cause, among those that came up to the step at which it fired.
        fired_at: that step.
        since: the streak of findings that it is the last of.
        hits: of each series with a finding at its last judged step, the streak of findings.
        clean: of other series that matter, the streak without; of none where one that fires had a finding last.
        last: of each of these, its last judged step.
        waiting: changes of series at steps that are not sealed, by step.
        causes: of each of these steps at which it could fire, why.
        bad: series with findings as of the last sealed step.
        firing: those that make it fire as of then.
        settled: of these the ones that have been clean for long enough.
        reached: the last step at which one of these changed.
        closed: the last step of the episodes that are over; -1 for none.
        ahead: the last step that was gone through though it was not sealed, for too much waited; -1 for none.
        over: of each series whose late rows are of such an episode, the last step that was sealed when they came.
        fired: of one that inhibits others, when it fired, as far as it matters to steps that are not sealed yet.
        quiet: of one that fires and is inhibited, by what.
    """

    model_config = ConfigDict(frozen=True)

    phase: Phase = Phase.INACTIVE
    finding: Finding | None = None
    fired_at: int = -1
    since: Streak = NONE
    hits: dict[str, Streak] = Field(default_factory=dict)
    clean: dict[str, Streak] = Field(default_factory=dict)
    last: dict[str, int] = Field(default_factory=dict)
    waiting: tuple[Mark, ...] = ()
    causes: tuple[LikelyCause, ...] = ()
    bad: tuple[str, ...] = ()
    firing: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()
    reached: int = -1
    closed: int = -1
    ahead: int = -1
    over: dict[str, int] = Field(default_factory=dict)
    fired: tuple[FiringSpan, ...] = ()
    quiet: Quiet | None = None

    @property
    def follows(self) -> bool:
        """Whether there are series whose next rows matter, also without a finding."""
        return bool(self.hits or self.clean)

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, data: Any) -> Any:
        """Earlier versions did not wait for seals: all that they knew of a series counted at once."""
        if isinstance(data, dict) and "firing" not in data:
            return {**data, "bad": tuple(data.get("hits", ())), "firing": tuple(data.get("clean", ()))}
        return data


@dataclass(frozen=True)
class Transition:
    """A change of phase, or of what an alert that fires names as the cause.

    Attributes:
        phase: the new one.
        step: at which it came; of one that is revised, at which it fired, as far as is known now.
        finding: the likeliest cause of what made the alert fire; None before it did.
        since_step: the first step of the streak that made it fire; of one that has not fired, ``step``.
        since_ns: when that was, nanoseconds since the epoch, by the clock of the row; 0 where it has not fired.
        inhibited_by: the rule config that keeps it quiet; empty where somebody is told.
        revised: it fired before, and names a likelier cause now.
    """

    phase: Phase
    step: int
    finding: Finding | None
    since_step: int
    since_ns: int
    inhibited_by: str = ""
    revised: bool = False


class Seals(NamedTuple):
    """The last step that was sealed before this evaluation, and the last that is now; -1 for none."""

    before: int
    now: int


ALL = Seals(-1, 1 << 62)
"""Where nobody waits for anybody: each row is all that will ever come of its step."""


MOST_WAITING = 10_000
"""Changes that wait for seals, half a megabyte as JSON; beyond that the earliest do not wait any longer."""


class Life:
    """One pass over what changes in an evaluation."""

    def __init__(self, memory: AlertMemory, timing: Timing, seals: Seals) -> None:
        self._before = memory
        self._timing = timing
        self._sealed = seals.now
        self._seals = Seals(max(seals.before, memory.ahead), max(seals.now, memory.ahead))
        self._phase, self._finding, self._since = memory.phase, memory.finding, memory.since
        self._fired_at, self._reached, self._closed = memory.fired_at, memory.reached, memory.closed
        self._hits, self._clean, self._last = dict(memory.hits), dict(memory.clean), dict(memory.last)
        self._bad, self._firing = set(memory.bad), set(memory.firing)
        self._settled, self._over = set(memory.settled), dict(memory.over)
        self._waiting = list(memory.waiting)
        self._newest = {mark.series: mark for mark in memory.waiting}
        self._causes = {cause.finding.step: _Suspect.of(cause) for cause in memory.causes}
        self._tick: Change | None = None
        self.transitions: list[Transition] = []

    def known(self) -> Known:
        """The series that matter, as they stand."""
        return Known(self._hits, self._clean, self._last)

    def take(self, streaks: Streaks) -> None:
        """Take in what rows do to series; nothing comes of it yet."""
        changes = streaks.changes
        if streaks.ticked:
            *changes, self._tick = changes
        late: list[Change] = []
        for change in self._that_count(changes, streaks, late):
            (late.append if change.step <= self._seals.before else self._wait)(change)
        self._judge_late(late)
        for series, end in streaks.ends.items():
            of, other = (self._hits, self._clean) if end.bad else (self._clean, self._hits)
            of[series] = end.streak
            other.pop(series, None)
            self._last[series] = end.step
        for change in streaks.behind:
            self._flash(change)

    def settle(self) -> None:
        """Go through the steps that are sealed now, in their order, and see what the others may make fire already."""
        self._waiting.sort(key=_step)
        beyond = len(self._waiting) - MOST_WAITING
        if beyond > 0:
            self._seals = self._seals._replace(now=max(self._seals.now, self._waiting[beyond - 1].step))
        due = [mark for mark in self._waiting if mark.step <= self._seals.now]
        self._waiting = self._waiting[len(due) :]
        self._revise()
        for step, marks in groupby(due, key=_step):
            self._judge(step, list(marks))
        self._judge_tick()
        self._causes = {step: one for step, one in self._causes.items() if step > self._seals.now}
        if self._causes and self._phase is not Phase.FIRING:
            self._fire(min(self._causes))

    def memory(self) -> AlertMemory:
        """What to keep, in an order that does not depend on how the rows came."""
        matter = self._firing | self._bad | {mark.series for mark in self._waiting}
        clean = {
            series: NONE if series in self._hits else self._clean.get(series, NONE)
            for series in sorted(matter)
            if series not in self._hits or series in self._firing
        }
        hits = {series: self._hits[series] for series in sorted(self._hits)}
        return self._before.model_copy(
            update={
                "phase": self._phase,
                "finding": self._finding,
                "fired_at": self._fired_at,
                "since": self._since,
                "hits": hits,
                "clean": clean,
                "last": {name: self._last[name] for name in sorted({*hits, *clean}) if name in self._last},
                "waiting": tuple(self._waiting),
                "causes": tuple(self._causes[step].cause() for step in sorted(self._causes)),
                "bad": tuple(sorted(self._bad)),
                "firing": tuple(sorted(self._firing)),
                "settled": tuple(sorted(self._settled)),
                "reached": self._reached,
                "closed": self._closed,
                "ahead": self._seals.now if self._seals.now > self._sealed else -1,
                "over": {name: self._over[name] for name in sorted(self._over)},
            }
        )

    def _is_over(self, step: int) -> bool:
        """Whether a row that comes now is of an episode that was over before."""
        return step <= min(self._closed, self._seals.before)

    def _that_count(
        self, changes: Sequence[Change], streaks: Streaks, late: list[Change]
    ) -> Iterator[Change]:
        """Changes in the order of the rows, but for those of what is over; in place of these the next row that is not."""
        queue = [(change.row, change.line, change) for change in changes]
        heapify(queue)
        while queue:
            change = heappop(queue)[2]
            if late and _place(change) != _place(late[0]):
                self._judge_late(late)
            if not self._is_of_what_is_over(change):
                yield change
            elif change.enough:
                later = streaks.beyond(change, self._over[change.series])
                if later is not None:
                    del self._over[change.series]
                    heappush(queue, (later.row, later.line, later))

    def _is_of_what_is_over(self, change: Change) -> bool:
        series = change.series
        if not change.bad:
            self._over.pop(series, None)
            return False
        if self._is_over(change.step):
            if change.enough:
                self._over.setdefault(series, self._seals.before)
            return True
        if change.step <= self._over.get(series, -1):
            return True
        self._over.pop(series, None)
        return False

    def _judge_late(self, changes: list[Change]) -> None:
        """Rows of a sealed step, of one worker: they say what they say when they come, in the order in which they do."""
        if not changes:
            return
        for change in changes:
            self._suspect(change)
        self._revise()
        self._judge(changes[0].step, [_mark(change) for change in changes])
        self._causes.pop(changes[0].step, None)
        changes.clear()

    def _wait(self, change: Change) -> None:
        mark = _mark(change)
        newest = self._newest.get(mark.series)
        stands = self._stands(mark.series) if newest is None else (newest.bad, newest.enough)
        if stands != (mark.bad, mark.enough):
            self._waiting.append(mark)
            self._newest[mark.series] = mark
            self._suspect(change)

    def _stands(self, series: str) -> tuple[bool, bool]:
        """Whether a series is bad as of the last sealed step, and for long enough, as far as that matters."""
        bad = series in self._bad
        return bad, series in (self._firing if bad else self._settled)

    def _suspect(self, change: Change) -> None:
        if not change.bad or not change.enough:
            return
        known, rank = self._causes.get(change.step), change.likelihood
        if known is None or rank < known.likelihood:
            self._causes[change.step] = _Suspect(rank, change)

    def _flash(self, change: Change) -> None:
        """A finding of a row that came after later ones of its series: bad at that step, and then as it is by now."""
        series = change.series
        if not change.enough or self._is_over(change.step):
            return
        if change.step <= self._seals.before:
            self._judge_late([change])
        else:
            self._waiting.append(Mark(change.step, series, bad=True, enough=True))
            self._suspect(change)
        if series not in self._hits:
            lasted = self._clean[series].steps >= self._timing.keep_steps and not self._timing.keep_ns
            mark = Mark(self._last[series], series, bad=False, enough=lasted)
            if mark.step <= self._seals.before:
                self._judge(mark.step, [mark])
            else:
                self._waiting.append(mark)
                self._newest[series] = mark

    def _judge(self, step: int, marks: Sequence[Mark]) -> None:
        """All that is known of a sealed step."""
        fired = bool(self._firing)
        for mark in marks:
            self._note(mark)
        if self._firing:
            if not fired:
                self._reached = step
                self._fire(step)
            if self._settled >= self._firing:
                self._close()
        elif self._bad and self._phase in (Phase.INACTIVE, Phase.RESOLVED):
            if step > self._closed or self._tick is not None:
                self._go(Phase.PENDING, step)
        elif not self._bad and self._phase is Phase.PENDING:
            self._go(Phase.INACTIVE, step)

    def _note(self, mark: Mark) -> None:
        series, before = mark.series, (mark.series in self._firing, mark.series in self._settled)
        if mark.bad:
            self._bad.add(series)
            self._settled.discard(series)
            if mark.enough:
                self._firing.add(series)
        else:
            self._bad.discard(series)
            if mark.enough and series in self._firing:
                self._settled.add(series)
            else:
                self._settled.discard(series)
        if before != (series in self._firing, series in self._settled):
            self._reached = max(self._reached, mark.step)

    def _judge_tick(self) -> None:
        change = self._tick
        if change is None:
            return
        if change.bad:
            self._causes[change.step] = _Suspect(change.likelihood, change)
        mark = Mark(change.step, change.series, change.bad, change.enough)
        self._judge(change.step, [mark])

    def _fire(self, step: int) -> None:
        """It fires for what makes it fire at a step; where it was said before that it does, that was said of this."""
        if self._phase is Phase.FIRING:
            return
        self._blame(self._causes[step].cause())
        self._fired_at = step
        self._go(Phase.FIRING, step)

    def _close(self) -> None:
        """The episode is over, and with it the steps up to this one."""
        self._closed = max(self._closed, self._reached)
        self._firing, self._settled = set(), set()
        self._go(Phase.RESOLVED, self._reached)
        if self._bad:
            self._go(Phase.PENDING, self._reached)

    def _revise(self) -> None:
        """Rows of another worker, or late ones, may hold what made the alert fire where it was seen first."""
        told, likeliest = self._finding, min(self._causes.values(), key=_likelihood, default=None)
        if self._phase is not Phase.FIRING or likeliest is None or told is None:
            return
        if likeliest.likelihood < likelihood(told):
            first = likeliest.cause()
            fired_at = told.step if self._fired_at < 0 else self._fired_at
            self._blame(first)
            self._fired_at = min(fired_at, first.finding.step)
            since = first.since
            self.transitions.append(
                Transition(
                    Phase.FIRING, self._fired_at, first.finding, since.first, since.time_ns, revised=True
                )
            )

    def _blame(self, cause: LikelyCause) -> None:
        self._finding, self._since = cause

    def _go(self, phase: Phase, step: int) -> None:
        self._phase = phase
        if phase in (Phase.FIRING, Phase.RESOLVED):
            since = self._since
            self.transitions.append(Transition(phase, step, self._finding, since.first, since.time_ns))
        else:
            self.transitions.append(Transition(phase, step, None, step, 0))


def _mark(change: Change) -> Mark:
    return Mark(change.step, change.series, change.bad, change.enough)


def _place(change: Change) -> tuple[int, str]:
    """The step, and the worker and mode."""
    return change.step, change.series.rpartition("@")[2]


def _step(mark: Mark) -> int:
    return mark.step


class _Suspect(NamedTuple):
    """What may be named as a cause; its finding is built where it is."""

    likelihood: Likelihood
    by: Change | LikelyCause

    @classmethod
    def of(cls, cause: LikelyCause) -> _Suspect:
        return cls(likelihood(cause.finding), cause)

    def cause(self) -> LikelyCause:
        return self.by if isinstance(self.by, LikelyCause) else LikelyCause(self.by.finding, self.by.since)


def _likelihood(suspect: _Suspect) -> Likelihood:
    return suspect.likelihood


PART_ROWS = 1 << 16


def advance(
    memory: AlertMemory,
    timing: Timing,
    rows: JudgedRows,
    findings: Sequence[Finding],
    tick: ClockTick | None = None,
    seals: Seals = ALL,
) -> tuple[AlertMemory, list[Transition]]:
    """Follow an alert over a judged block. Where there are no findings and were none, this costs nothing.

    Findings about the run as a whole count once for each step that the block holds; of a rule that watches the clock
    they count at the tick: its alert is firing while the last evaluation said so, and for ``hold_ns`` before, and
    resolved by one that says nothing.

    Args:
        memory: as the last call returned it.
        timing: ``for`` and ``keep_firing``.
        rows: the judged rows, in the order in which they were judged; empty where only a seal moved on.
        findings: what the rule said of them.
        tick: of a rule that watches the clock; its block may be empty.
        seals: which steps are sealed.
    """
    if not findings and not memory.follows:
        return memory, []
    life = Life(memory, timing, seals)
    for part in _parts(rows, findings, tick):
        known = life.known()
        if part.findings or known.hits or known.clean:
            life.take(follow(part.rows, part.findings, known, timing, part.tick))
    life.settle()
    return life.memory(), life.transitions


@dataclass(frozen=True)
class _Part:
    rows: JudgedRows
    findings: Sequence[Finding]
    tick: ClockTick | None


def _parts(rows: JudgedRows, findings: Sequence[Finding], tick: ClockTick | None) -> Iterator[_Part]:
    """A long block in parts of whole steps, so that only those near findings are looked at."""
    if len(rows) <= PART_ROWS:
        yield _Part(rows, findings, tick)
        return
    about_run = [finding for finding in findings if not finding.tensor] if tick else []
    others = [finding for finding in findings if finding.tensor] if tick else findings
    steps = steps_of(others)
    order = np.argsort(steps, kind="stable")
    steps = steps[order]
    begins = np.flatnonzero(rows.step[1:] != rows.step[:-1]) + 1
    wanted = np.searchsorted(begins, np.arange(PART_ROWS, len(rows), PART_ROWS))
    cuts = np.unique([0, *begins[wanted[wanted < len(begins)]], len(rows)]).tolist()
    for start, end in pairwise(cuts):
        part = rows.part(slice(start, end))
        first = np.searchsorted(steps, part.step.min(), side="left")
        after = np.searchsorted(steps, part.step.max(), side="right")
        held = taken(others, order[first:after])
        last = end == len(rows)
        yield _Part(part, [*held, *about_run] if last else held, tick if last else None)


def as_told(transitions: Iterable[Transition]) -> list[Transition]:
    """Changes with each revision taken into the firing before it, where that is among them.

    A firing that was revised says what the last revision says. Of revisions of one that is not among them the last is left, as a
    revision.
    """
    told: list[Transition] = []
    for change in transitions:
        if change.revised and told and told[-1].phase is Phase.FIRING:
            before = told[-1]
            told[-1] = replace(change, inhibited_by=before.inhibited_by, revised=before.revised)
        else:
            told.append(change)
    return told
