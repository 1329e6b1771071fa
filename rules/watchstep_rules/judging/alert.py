"""The life of an alert: inactive → pending → firing → resolved, as data.

An alert belongs to one rule config on one attempt of a run. It is pending while some tensor has findings but not yet
for as long as ``for`` asks; firing once one has; resolved when every tensor that made it fire has been judged clean for
as long as ``keep_firing`` asks.

It fires with the first rows that make it fire, and waits for no other worker. What it names is the likeliest cause of all
that is known: where rows of that step or an earlier one, which come later, hold a likelier one, it is revised.

What is over stays over: rows of its steps that come after it was resolved, of a worker that lags, start no other episode. A series
that still has findings after those steps does, from its first row about a later one on.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from watchstep.block import Block
from watchstep_rules.finding import Finding, likelihood
from watchstep_rules.judging.streaks import NONE, Change, JudgedRows, Streak, Streaks, Tick, Timing, follow

PART_ROWS = 1 << 16
_NEVER = 1 << 62


class Phase(str, Enum):
    """Where an alert stands."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class Fired(NamedTuple):
    """Steps at which an alert fired: from the first, until one that is not among them; None while it fires."""

    first: int
    until: int | None


class Quiet(NamedTuple):
    """Of an alert that fires and nobody is told of: which rule config inhibits it, and a step at which one does."""

    by: str
    step: int


class AlertMemory(BaseModel):
    """What is kept of an alert between blocks.

    Attributes:
        phase: where it stands.
        finding: that of the likeliest cause, among those that came up to the step at which it fired.
        fired_at: that step.
        since: the streak of findings that it is the last of.
        hits: of each series (tensor@worker/mode) with a finding at its last judged step, the streak of findings.
        clean: of each series that fires, the streak without; of none at its last judged step where it had a finding.
        settled: of these the ones that have been clean for long enough.
        closed: the last step of the episodes that are over; -1 for none.
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
    settled: tuple[str, ...] = ()
    closed: int = -1
    fired: tuple[Fired, ...] = ()
    quiet: Quiet | None = None


@dataclass(frozen=True)
class Transition:
    """A change of phase, or of what an alert that fires names as the cause.

    Attributes:
        phase: the new one.
        step: at which it came; of one that is revised, at which it fired.
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


def advance(
    memory: AlertMemory,
    timing: Timing,
    block: Block,
    findings: Sequence[Finding],
    tick: Tick | None = None,
) -> tuple[AlertMemory, list[Transition]]:
    """Follow an alert over a judged block. Where there are no findings and were none, this costs nothing.

    Findings about the run as a whole count once for each step that the block holds; of a rule that watches the clock
    they count at the tick: its alert is firing while the last evaluation said so, and for ``hold_ns`` before, and
    resolved by one that says nothing.

    Args:
        memory: as the last call returned it.
        timing: ``for`` and ``keep_firing``.
        block: the judged rows, in the order in which they were judged.
        findings: what the rule said of them.
        tick: of a rule that watches the clock; its block may be empty.
    """
    if not findings and not memory.hits and not memory.clean:
        return memory, []
    transitions: list[Transition] = []
    for part in _parts(block, findings, tick):
        if part.findings or memory.hits or memory.clean:
            streaks = follow(part.rows, part.findings, (memory.hits, memory.clean), timing, part.tick)
            life = _Life(memory, streaks)
            life.live()
            memory = life.memory()
            transitions += life.transitions
    return memory, transitions


@dataclass(frozen=True)
class _Part:
    rows: JudgedRows
    findings: Sequence[Finding]
    tick: Tick | None


def _parts(block: Block, findings: Sequence[Finding], tick: Tick | None) -> Iterator[_Part]:
    """A long block in parts of whole steps, so that only those near findings are looked at."""
    if len(block) <= PART_ROWS:
        yield _Part(JudgedRows.of(block, slice(None)), findings, tick)
        return
    about_run = [finding for finding in findings if not finding.tensor] if tick else []
    others = sorted((finding for finding in findings if finding.tensor or not tick), key=_step)
    steps = [finding.step for finding in others]
    begins = np.flatnonzero(block.step[1:] != block.step[:-1]) + 1
    wanted = np.searchsorted(begins, np.arange(PART_ROWS, len(block), PART_ROWS))
    cuts = np.unique([0, *begins[wanted[wanted < len(begins)]], len(block)]).tolist()
    for start, end in pairwise(cuts):
        rows = JudgedRows.of(block, slice(start, end))
        held = others[bisect_left(steps, rows.step.min()) : bisect_right(steps, rows.step.max())]
        last = end == len(block)
        yield _Part(rows, [*held, *about_run] if last else held, tick if last else None)


def _step(finding: Finding) -> int:
    return finding.step


class _Life:
    """One pass over what changes in a block."""

    def __init__(self, memory: AlertMemory, streaks: Streaks) -> None:
        self._before = memory
        self._streaks = streaks
        self._phase = memory.phase
        self._finding = memory.finding
        self._fired_at = memory.fired_at
        self._since = memory.since
        self._closed = memory.closed
        self._hits = set(memory.hits)
        self._fired = set(memory.clean)
        self._settled = set(memory.settled)
        self._clean_from = {series: streak.first for series, streak in memory.clean.items()}
        self._suspended = _Suspended(streaks)
        self.transitions: list[Transition] = []

    def live(self) -> None:
        """Go through the changes, group by group."""
        judged = -1  # the last group after which the alert was looked at
        for group, changes in self._suspended.among(self._streaks.changes):
            self._look_again(judged + 1, group)
            ripe = [change for change in changes if self._note(change)]
            self._settle(group, ripe)
            judged = group
        self._look_again(judged + 1, len(self._streaks.steps))

    def memory(self) -> AlertMemory:
        """What to keep, in an order that does not depend on how the rows came."""
        ends = self._streaks.ends
        hits = {
            series: ends[series][1] if series in ends else self._before.hits[series]
            for series in sorted(self._hits)
        }
        clean = {}
        for series in sorted(self._fired):
            found, streak = ends.get(series, (False, self._before.clean.get(series, NONE)))
            clean[series] = NONE if found else streak
        return self._before.model_copy(
            update={
                "phase": self._phase,
                "finding": self._finding,
                "fired_at": self._fired_at,
                "since": self._since,
                "hits": hits,
                "clean": clean,
                "settled": tuple(sorted(self._settled)),
                "closed": self._closed,
            }
        )

    def _note(self, change: Change) -> bool:
        """Take in a change; whether it can make the alert fire."""
        series = change.series
        if change.finding is None:
            self._hits.discard(series)
            self._suspended.end(series)
            self._clean_from[series] = change.since.first
            if change.enough and series in self._fired:
                self._settled.add(series)
            else:
                self._settled.discard(series)
            return False
        self._hits.add(series)
        self._settled.discard(series)
        if not change.enough:
            return False
        if self._is_over(change.group):
            self._suspended.add(change, self._closed)
            return False
        self._fired.add(series)
        return True

    def _is_over(self, group: int) -> bool:
        """Whether a group is about a step of an episode that is over."""
        return group != self._streaks.tick and int(self._streaks.steps[group]) <= self._closed

    def _look_again(self, group: int, end: int) -> None:
        """Where nothing changes: with findings, an alert that is over is pending from the next group of a later step on."""
        if group < end and self._hits and self._phase in (Phase.RESOLVED, Phase.INACTIVE):
            places = np.flatnonzero(self._streaks.steps[group:end] > self._closed)
            later = group + int(places[0]) if len(places) else self._streaks.tick
            if group <= later < end:
                self._settle(later, [])

    def _settle(self, group: int, ripe: list[Change]) -> None:
        step = int(self._streaks.steps[group])
        if self._phase is Phase.FIRING:
            self._revise(ripe)
            if len(self._settled) == len(self._fired):
                self._close(step)
        elif ripe:
            self._blame(min(ripe, key=_cause))
            self._fired_at = step
            self._go(Phase.FIRING, step)
        elif self._hits and self._phase is not Phase.PENDING:
            if not self._is_over(group):
                self._go(Phase.PENDING, step)
        elif not self._hits and self._phase is Phase.PENDING:
            self._go(Phase.INACTIVE, step)

    def _close(self, step: int) -> None:
        """The episode is over, and with it the steps up to this one and to those at which its series were clean."""
        ends = [self._clean_from[series] for series in self._fired]
        self._closed = max(self._closed, self._fired_at, step, *ends)
        self._fired, self._settled = set(), set()
        self._go(Phase.RESOLVED, step)

    def _revise(self, ripe: list[Change]) -> None:
        """Rows of another worker, or late ones, may hold what made the alert fire where it was seen first."""
        told, first = self._finding, min(ripe, key=_cause, default=None)
        if first is None or told is None or _cause(first) >= likelihood(told):
            return
        self._blame(first)
        step, since = max(self._fired_at, told.step), self._since
        self.transitions.append(
            Transition(Phase.FIRING, step, self._finding, since.first, since.time_ns, revised=True)
        )

    def _blame(self, change: Change) -> None:
        self._finding, self._since = change.finding, change.since

    def _go(self, phase: Phase, step: int) -> None:
        self._phase = phase
        if phase in (Phase.FIRING, Phase.RESOLVED):
            since = self._since
            self.transitions.append(Transition(phase, step, self._finding, since.first, since.time_ns))
        else:
            self.transitions.append(Transition(phase, step, None, step, 0))


class _Suspended:
    """Series whose findings are of steps that are over: each is looked at again at its first row about a later one."""

    def __init__(self, streaks: Streaks) -> None:
        self._streaks = streaks
        self._queue: list[tuple[int, int, Change]] = []
        self._until: dict[str, int] = {}

    def add(self, change: Change, closed: int) -> None:
        """Suspend a series; where it is already, that goes on."""
        if self._until.get(change.series, -1) >= change.line + 1:
            return
        later = self._streaks.beyond(change, closed)
        self._until[change.series] = later.line if later else _NEVER
        if later:
            heapq.heappush(self._queue, (later.group, later.row, later))

    def end(self, series: str) -> None:
        """It has no findings any more."""
        self._until.pop(series, None)

    def among(self, changes: Sequence[Change]) -> Iterator[tuple[int, list[Change]]]:
        """Changes and rows that are to be looked at again, group by group, in the order of the rows."""
        place = 0
        while place < len(changes) or self._queue:
            ahead = [change.group for change in changes[place : place + 1]] + [
                group for group, _, _ in self._queue[:1]
            ]
            group, held = min(ahead), []
            while place < len(changes) and changes[place].group == group:
                held.append(changes[place])
                place += 1
            while self._queue and self._queue[0][0] == group:
                held.append(heapq.heappop(self._queue)[2])
            yield group, sorted(held, key=_row)


def _row(change: Change) -> int:
    return change.row


def _cause(change: Change) -> tuple[int, tuple[int, int], int]:
    assert change.finding is not None
    return likelihood(change.finding)
