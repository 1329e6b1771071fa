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
``queued_changes`` and applied step by step when the watermark passes them. The result is therefore what it would be if all rows arrived in
order, one step at a time. If later rows show that the alert fired at an earlier step, or for a likelier cause, it is *revised*.

**Late rows.** Rows of a step behind the watermark (of a worker that was no longer waited for) take effect when they arrive. They do not
start a new episode if they belong to a closed one: neither at its own steps, nor at later steps that the watermark had passed when the
rows arrived. Later findings of the same series do.

**Bounded queue.** If one worker stands still while many series change, the queue is bounded by `MAX_QUEUED_CHANGES`: its earliest steps are
applied as if the watermark had passed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from watchstep_rules.config.rule_config import Timing
from watchstep_rules.engine.series_limit import limited
from watchstep_rules.engine.streaks import (
    NONE,
    Change,
    ClockTick,
    JudgedRows,
    OpenSeries,
    Streak,
    Streaks,
    follow,
)
from watchstep_rules.rule import Finding, Likelihood, likelihood, steps_of, taken


class Phase(str, Enum):
    """The phase of an alert."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class FiringSpan(NamedTuple):
    """Steps at which an alert fired: from ``first`` to before ``until``; ``until`` is None while it fires."""

    first: int
    until: int | None


class InhibitedBy(NamedTuple):
    """Why a firing alert does not notify: the rule config that inhibits it, and a step at which it does."""

    by: str
    step: int


class QueuedChange(NamedTuple):
    """A step at which a streak of a series begins, or becomes long enough."""

    step: int
    series: str
    has_finding: bool
    long_enough: bool


class LikelyCause(NamedTuple):
    """The likeliest finding that could have made an alert fire at its step, and its streak."""

    finding: Finding
    streak: Streak


class AlertMemory(BaseModel):
    """The state of an alert between blocks; stored as JSON. JSON with other keys is rejected, so that the alert begins anew.

    A series is ``tensor@worker/mode``. Streaks cover all rows that arrived; their effects on the alert are queued until the watermark
    passes their step.

    Attributes:
        phase: the reported phase. The alert may fire before the watermark passes the step.
        finding: the likeliest cause among the findings up to the step at which the alert fired.
        fired_at: the step at which the alert fired.
        streak: the streak that ends with ``finding``.
        finding_streaks: streaks of findings, of series with a finding at their last judged step.
        clean_streaks: clean streaks of the other followed series. A firing series with a finding at its last step has an empty streak.
        last_steps: the last judged step of each series in ``finding_streaks`` and ``clean_streaks``.
        queued_changes: changes of series at steps after the watermark, by step.
        causes: for each queued step at which the alert could fire, the cause.
        series_with_findings: series with findings as of the watermark.
        firing_series: series that make the alert fire as of the watermark.
        resolved_series: firing series that have been clean for long enough.
        changed_at: the last step at which ``firing_series`` or ``resolved_series`` changed.
        closed_to: the last step of closed episodes; -1 if there are none.
        applied_to: the last step that was applied before the watermark passed it because the queue was full; -1 if there is none.
        closed_series: for each series with late rows of a closed episode, the watermark when they arrived.
        firing_spans: for a source of inhibition, when it fired, as far as steps after the watermark need it.
        inhibition: for an alert that fires and is inhibited, by which rule config.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: Phase = Phase.INACTIVE
    finding: Finding | None = None
    fired_at: int = -1
    streak: Streak = NONE
    finding_streaks: dict[str, Streak] = Field(default_factory=dict)
    clean_streaks: dict[str, Streak] = Field(default_factory=dict)
    last_steps: dict[str, int] = Field(default_factory=dict)
    queued_changes: tuple[QueuedChange, ...] = ()
    causes: tuple[LikelyCause, ...] = ()
    series_with_findings: tuple[str, ...] = ()
    firing_series: tuple[str, ...] = ()
    resolved_series: tuple[str, ...] = ()
    changed_at: int = -1
    closed_to: int = -1
    applied_to: int = -1
    closed_series: dict[str, int] = Field(default_factory=dict)
    firing_spans: tuple[FiringSpan, ...] = ()
    inhibition: InhibitedBy | None = None

    @property
    def follows(self) -> bool:
        """Whether the alert follows any series, so that their next rows count even without a finding."""
        return bool(self.finding_streaks or self.clean_streaks)


@dataclass(frozen=True)
class Transition:
    """A change of an alert's phase, or of the cause that a firing alert names.

    Attributes:
        phase: the new phase.
        step: the step of the change; for a revision, the corrected step at which the alert fired.
        finding: the likeliest cause of the firing; None before it fires.
        since_step: the first step of the streak that made the alert fire; ``step`` if it has not fired.
        since_ns: the time of that step's row, nanoseconds since the epoch; 0 if the alert has not fired.
        inhibited_by: the rule config that inhibits notification; empty if notifications are sent.
        revised: whether the alert fired before and now names a likelier cause.
        loaded_at: for a resolved alert, the step after which the program loaded weights after the alert fired; None if it did not, or the
            rule does not follow it.
    """

    phase: Phase
    step: int
    finding: Finding | None
    since_step: int
    since_ns: int
    inhibited_by: str = ""
    revised: bool = False
    loaded_at: int | None = None


class Watermarks(NamedTuple):
    """The watermarks before this evaluation and now: the last step that all live workers passed; -1 for none."""

    before: int
    now: int


UNBOUNDED = Watermarks(-1, 1 << 62)
"""No worker is waited for: each row is the last one of its step."""


MAX_QUEUED_CHANGES = 10_000
"""Limit of queued changes, half a megabyte as JSON. Beyond it the earliest are applied before the watermark passes them."""


class AlertStateMachine:
    """Applies the changes of one evaluation to an alert: `add` each block's streaks, `apply_watermark`, then read `memory`."""

    def __init__(self, memory: AlertMemory, timing: Timing, watermarks: Watermarks) -> None:
        self._before = memory
        self._timing = timing
        self._watermark = watermarks.now
        self._watermarks = Watermarks(
            max(watermarks.before, memory.applied_to), max(watermarks.now, memory.applied_to)
        )
        self._phase, self._finding, self._streak = memory.phase, memory.finding, memory.streak
        self._fired_at, self._changed_at, self._closed_to = (
            memory.fired_at,
            memory.changed_at,
            memory.closed_to,
        )
        self._finding_streaks, self._clean_streaks, self._last_steps = (
            dict(memory.finding_streaks),
            dict(memory.clean_streaks),
            dict(memory.last_steps),
        )
        self._series_with_findings, self._firing_series = (
            set(memory.series_with_findings),
            set(memory.firing_series),
        )
        self._resolved_series, self._closed_series = set(memory.resolved_series), dict(memory.closed_series)
        self._queued_changes = list(memory.queued_changes)
        self._newest_changes = {queued.series: queued for queued in memory.queued_changes}
        self._causes = {cause.finding.step: _CauseCandidate.of(cause) for cause in memory.causes}
        self._tick: Change | None = None
        self.transitions: list[Transition] = []

    def open_series(self) -> OpenSeries:
        """The current state of the followed series."""
        return OpenSeries(self._finding_streaks, self._clean_streaks, self._last_steps)

    def add(self, streaks: Streaks) -> None:
        """Queue the changes of a block; late ones are applied at once."""
        changes = streaks.changes
        if streaks.has_tick:
            *changes, self._tick = changes
        late: list[Change] = []
        for change in self._relevant(changes, streaks, late):
            (late.append if change.step <= self._watermarks.before else self._queue)(change)
        self._apply_late(late)
        for series, end in streaks.ends.items():
            current, other = (
                (self._finding_streaks, self._clean_streaks)
                if end.has_finding
                else (self._clean_streaks, self._finding_streaks)
            )
            current[series] = end.streak
            other.pop(series, None)
            self._last_steps[series] = end.step
        for change in streaks.out_of_order:
            self._apply_out_of_order(change)

    def apply_watermark(self) -> None:
        """Apply the queued steps up to the watermark in order, then fire for later steps where a cause is known."""
        self._queued_changes.sort(key=_step)
        excess = len(self._queued_changes) - MAX_QUEUED_CHANGES
        if excess > 0:
            self._watermarks = self._watermarks._replace(
                now=max(self._watermarks.now, self._queued_changes[excess - 1].step)
            )
        due = [queued for queued in self._queued_changes if queued.step <= self._watermarks.now]
        self._queued_changes = self._queued_changes[len(due) :]
        self._revise()
        for step, changes in groupby(due, key=_step):
            self._apply_step(step, list(changes))
        self._apply_tick()
        self._causes = {step: cause for step, cause in self._causes.items() if step > self._watermarks.now}
        if self._causes and self._phase is not Phase.FIRING:
            self._fire(min(self._causes))

    def memory(self) -> AlertMemory:
        """The state to store, in an order that does not depend on the order of arrival."""
        followed = (
            self._firing_series
            | self._series_with_findings
            | {queued.series for queued in self._queued_changes}
        )
        clean_streaks = {
            series: NONE if series in self._finding_streaks else self._clean_streaks.get(series, NONE)
            for series in sorted(followed)
            if series not in self._finding_streaks or series in self._firing_series
        }
        finding_streaks = {series: self._finding_streaks[series] for series in sorted(self._finding_streaks)}
        return self._before.model_copy(
            update={
                "phase": self._phase,
                "finding": self._finding,
                "fired_at": self._fired_at,
                "streak": self._streak,
                "finding_streaks": finding_streaks,
                "clean_streaks": clean_streaks,
                "last_steps": {
                    name: self._last_steps[name]
                    for name in sorted({*finding_streaks, *clean_streaks})
                    if name in self._last_steps
                },
                "queued_changes": tuple(self._queued_changes),
                "causes": tuple(self._causes[step].cause() for step in sorted(self._causes)),
                "series_with_findings": tuple(sorted(self._series_with_findings)),
                "firing_series": tuple(sorted(self._firing_series)),
                "resolved_series": tuple(sorted(self._resolved_series)),
                "changed_at": self._changed_at,
                "closed_to": self._closed_to,
                "applied_to": self._watermarks.now if self._watermarks.now > self._watermark else -1,
                "closed_series": {name: self._closed_series[name] for name in sorted(self._closed_series)},
            }
        )

    def _is_closed(self, step: int) -> bool:
        """Whether a row of this step that arrives now belongs to a closed episode."""
        return step <= min(self._closed_to, self._watermarks.before)

    def _relevant(self, changes: Sequence[Change], streaks: Streaks, late: list[Change]) -> Iterator[Change]:
        """Yield changes in row order. A change in a closed episode is replaced by the first later row of its streak outside of it."""
        queue = [(change.row, change.index, change) for change in changes]
        heapify(queue)
        while queue:
            change = heappop(queue)[2]
            if late and _step_and_worker(change) != _step_and_worker(late[0]):
                self._apply_late(late)
            if not self._is_in_closed_episode(change):
                yield change
            elif change.long_enough:
                later = streaks.first_after(change, self._closed_series[change.series])
                if later is not None:
                    del self._closed_series[change.series]
                    heappush(queue, (later.row, later.index, later))

    def _is_in_closed_episode(self, change: Change) -> bool:
        series = change.series
        if not change.has_finding:
            self._closed_series.pop(series, None)
            return False
        if self._is_closed(change.step):
            if change.long_enough:
                self._closed_series.setdefault(series, self._watermarks.before)
            return True
        if change.step <= self._closed_series.get(series, -1):
            return True
        self._closed_series.pop(series, None)
        return False

    def _apply_late(self, changes: list[Change]) -> None:
        """Apply changes of one worker at a step behind the watermark, in order of arrival."""
        if not changes:
            return
        for change in changes:
            self._record_cause(change)
        self._revise()
        self._apply_step(changes[0].step, [_queued(change) for change in changes])
        self._causes.pop(changes[0].step, None)
        changes.clear()

    def _queue(self, change: Change) -> None:
        queued = _queued(change)
        newest = self._newest_changes.get(queued.series)
        status = self._status(queued.series) if newest is None else (newest.has_finding, newest.long_enough)
        if status != (queued.has_finding, queued.long_enough):
            self._queued_changes.append(queued)
            self._newest_changes[queued.series] = queued
            self._record_cause(change)

    def _status(self, series: str) -> tuple[bool, bool]:
        """Whether a series has findings as of the watermark, and whether its streak is long enough to fire or to resolve."""
        has_findings = series in self._series_with_findings
        return has_findings, series in (self._firing_series if has_findings else self._resolved_series)

    def _record_cause(self, change: Change) -> None:
        if not change.has_finding or not change.long_enough:
            return
        likeliest, rank = self._causes.get(change.step), change.likelihood
        if likeliest is None or rank < likeliest.likelihood:
            self._causes[change.step] = _CauseCandidate(rank, change)

    def _apply_out_of_order(self, change: Change) -> None:
        """Apply a finding that arrived after later rows of its series: a change at its step, then one back to the current state."""
        series = change.series
        if not change.long_enough or self._is_closed(change.step):
            return
        if change.step <= self._watermarks.before:
            self._apply_late([change])
        else:
            self._queued_changes.append(QueuedChange(change.step, series, has_finding=True, long_enough=True))
            self._record_cause(change)
        if series not in self._finding_streaks:
            lasted = self._clean_streaks[series].steps >= self._timing.keep_steps and not self._timing.keep_ns
            queued = QueuedChange(self._last_steps[series], series, has_finding=False, long_enough=lasted)
            if queued.step <= self._watermarks.before:
                self._apply_step(queued.step, [queued])
            else:
                self._queued_changes.append(queued)
                self._newest_changes[series] = queued

    def _apply_step(self, step: int, changes: Sequence[QueuedChange]) -> None:
        """Apply all changes of one step."""
        fired = bool(self._firing_series)
        for queued in changes:
            self._update_series(queued)
        if self._firing_series:
            if not fired:
                self._changed_at = step
                self._fire(step)
            if self._resolved_series >= self._firing_series:
                self._close()
        elif self._series_with_findings and self._phase in (Phase.INACTIVE, Phase.RESOLVED):
            if step > self._closed_to or self._tick is not None:
                self._enter(Phase.PENDING, step)
        elif not self._series_with_findings and self._phase is Phase.PENDING:
            self._enter(Phase.INACTIVE, step)

    def _update_series(self, queued: QueuedChange) -> None:
        series, before = (
            queued.series,
            (queued.series in self._firing_series, queued.series in self._resolved_series),
        )
        if queued.has_finding:
            self._series_with_findings.add(series)
            self._resolved_series.discard(series)
            if queued.long_enough:
                self._firing_series.add(series)
        else:
            self._series_with_findings.discard(series)
            if queued.long_enough and series in self._firing_series:
                self._resolved_series.add(series)
            else:
                self._resolved_series.discard(series)
        if before != (series in self._firing_series, series in self._resolved_series):
            self._changed_at = max(self._changed_at, queued.step)

    def _apply_tick(self) -> None:
        change = self._tick
        if change is None:
            return
        if change.has_finding:
            self._causes[change.step] = _CauseCandidate(change.likelihood, change)
        queued = QueuedChange(change.step, change.series, change.has_finding, change.long_enough)
        self._apply_step(change.step, [queued])

    def _fire(self, step: int) -> None:
        """Enter FIRING for the cause at a step; no effect if the alert already fires."""
        if self._phase is Phase.FIRING:
            return
        self._set_cause(self._causes[step].cause())
        self._fired_at = step
        self._enter(Phase.FIRING, step)

    def _close(self) -> None:
        """Close the episode and its steps."""
        self._closed_to = max(self._closed_to, self._changed_at)
        self._firing_series, self._resolved_series = set(), set()
        self._enter(Phase.RESOLVED, self._changed_at)
        if self._series_with_findings:
            self._enter(Phase.PENDING, self._changed_at)

    def _revise(self) -> None:
        """Revise a firing alert if rows of another worker, or late rows, show a likelier cause."""
        reported, likeliest = self._finding, min(self._causes.values(), key=_likelihood, default=None)
        if self._phase is not Phase.FIRING or likeliest is None or reported is None:
            return
        if likeliest.likelihood < likelihood(reported):
            first = likeliest.cause()
            self._set_cause(first)
            self._fired_at = min(self._fired_at, first.finding.step)
            streak = first.streak
            self.transitions.append(
                Transition(
                    Phase.FIRING, self._fired_at, first.finding, streak.first, streak.time_ns, revised=True
                )
            )

    def _set_cause(self, cause: LikelyCause) -> None:
        self._finding, self._streak = cause

    def _enter(self, phase: Phase, step: int) -> None:
        self._phase = phase
        if phase in (Phase.FIRING, Phase.RESOLVED):
            streak = self._streak
            self.transitions.append(Transition(phase, step, self._finding, streak.first, streak.time_ns))
        else:
            self.transitions.append(Transition(phase, step, None, step, 0))


def _queued(change: Change) -> QueuedChange:
    return QueuedChange(change.step, change.series, change.has_finding, change.long_enough)


def _step_and_worker(change: Change) -> tuple[int, str]:
    """The step of a change, and ``worker/mode`` of its series."""
    return change.step, change.series.rpartition("@")[2]


def _step(queued: QueuedChange) -> int:
    return queued.step


class _CauseCandidate(NamedTuple):
    """A possible cause. Its finding is built only if the alert names it."""

    likelihood: Likelihood
    source: Change | LikelyCause

    @classmethod
    def of(cls, cause: LikelyCause) -> _CauseCandidate:
        return cls(likelihood(cause.finding), cause)

    def cause(self) -> LikelyCause:
        source = self.source
        return source if isinstance(source, LikelyCause) else LikelyCause(source.finding, source.streak)


def _likelihood(candidate: _CauseCandidate) -> Likelihood:
    return candidate.likelihood


PART_ROWS = 1 << 16


def advance(
    memory: AlertMemory,
    timing: Timing,
    rows: JudgedRows,
    findings: Sequence[Finding],
    tick: ClockTick | None = None,
    watermarks: Watermarks = UNBOUNDED,
) -> tuple[AlertMemory, list[Transition]]:
    """Advance an alert over a judged block. Returns at once if there are no findings and the alert follows no series.

    Findings about the run as a whole count once for each step in the block. For a rule that watches the clock they count at the tick:
    its alert fires once evaluations have had a finding for ``hold_ns``, and resolves at an evaluation without one.

    Args:
        memory: the state that the last call returned.
        timing: ``for`` and ``keep_firing``.
        rows: the judged rows, in the order in which they were judged; empty if only the watermark moved.
        findings: the rule's findings for these rows.
        tick: the tick of a rule that watches the clock; its block may be empty.
        watermarks: the watermarks before and after this evaluation.
    """
    if not findings and not memory.follows:
        return memory, []
    machine = AlertStateMachine(memory, timing, watermarks)
    for part in _parts(rows, findings, tick):
        series = machine.open_series()
        findings = limited(part.findings, {*series.finding_streaks, *series.clean_streaks})
        if findings or series.finding_streaks or series.clean_streaks:
            machine.add(follow(part.rows, findings, series, timing, part.tick))
    machine.apply_watermark()
    return machine.memory(), machine.transitions


@dataclass(frozen=True)
class _Part:
    rows: JudgedRows
    findings: Sequence[Finding]
    tick: ClockTick | None


def _parts(rows: JudgedRows, findings: Sequence[Finding], tick: ClockTick | None) -> Iterator[_Part]:
    """Split a long block into parts of whole steps, so that `follow` runs only on parts near findings."""
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
        of_part = taken(others, order[first:after])
        last = end == len(rows)
        # Findings are built only where the two are joined: an alert needs few of them.
        yield _Part(part, [*of_part, *about_run] if last and about_run else of_part, tick if last else None)


def coalesce(transitions: Iterable[Transition]) -> list[Transition]:
    """Merge each revision into the firing before it, if that is among the transitions.

    A merged firing has the content of its last revision. Revisions of a firing that is not among the transitions are merged into the
    last of them, which remains a revision.
    """
    coalesced: list[Transition] = []
    for change in transitions:
        if change.revised and coalesced and coalesced[-1].phase is Phase.FIRING:
            before = coalesced[-1]
            coalesced[-1] = replace(change, inhibited_by=before.inhibited_by, revised=before.revised)
        else:
            coalesced.append(change)
    return coalesced
