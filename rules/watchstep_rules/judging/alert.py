"""The life of an alert: inactive → pending → firing → resolved, as data.

An alert belongs to one rule config on one attempt of a run. It is pending while some tensor has findings but not yet
for as long as ``for`` asks; firing once one has; resolved when every tensor that made it fire has been judged clean for
as long as ``keep_firing`` asks.

It fires with the first rows that make it fire, and waits for no other worker. What it names is the likeliest cause of all
that is known: where rows of that step or an earlier one, which come later, hold a likelier one, it is revised.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from watchstep.block import Block
from watchstep_rules.finding import Finding, likelihood
from watchstep_rules.judging.streaks import NONE, Change, JudgedRows, Streak, Streaks, Tick, Timing, follow

PART_ROWS = 1 << 16


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
            life = _Life(memory)
            life.live(streaks)
            memory = life.memory(streaks)
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

    def __init__(self, memory: AlertMemory) -> None:
        self._before = memory
        self._phase = memory.phase
        self._finding = memory.finding
        self._fired_at = memory.fired_at
        self._since = memory.since
        self._hits = set(memory.hits)
        self._fired = set(memory.clean)
        self._settled = set(memory.settled)
        self.transitions: list[Transition] = []

    def live(self, streaks: Streaks) -> None:
        """Go through the changes, group by group."""
        judged = -1  # the last group after which the alert was looked at
        for group, changes in groupby(streaks.changes, key=lambda change: change.group):
            self._look_again(judged + 1, group, streaks)
            ripe = []
            for change in changes:
                self._note(change)
                if change.finding is not None and change.enough:
                    ripe.append(change)
            self._settle(int(streaks.steps[group]), ripe)
            judged = group
        self._look_again(judged + 1, len(streaks.steps), streaks)

    def memory(self, streaks: Streaks) -> AlertMemory:
        """What to keep, in an order that does not depend on how the rows came."""
        ends = streaks.ends
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
            }
        )

    def _note(self, change: Change) -> None:
        series = change.series
        if change.finding is None:
            self._hits.discard(series)
            if change.enough and series in self._fired:
                self._settled.add(series)
            else:
                self._settled.discard(series)
            return
        self._hits.add(series)
        self._settled.discard(series)
        if change.enough:
            self._fired.add(series)

    def _look_again(self, group: int, end: int, streaks: Streaks) -> None:
        """An alert that was resolved while another series had findings is pending from the next group on."""
        if group < end and self._phase is Phase.RESOLVED and self._hits:
            self._settle(int(streaks.steps[group]), [])

    def _settle(self, step: int, ripe: list[Change]) -> None:
        if self._phase is Phase.FIRING:
            self._revise(ripe)
            if len(self._settled) == len(self._fired):
                self._fired, self._settled = set(), set()
                self._go(Phase.RESOLVED, step)
        elif ripe:
            self._blame(min(ripe, key=_cause))
            self._fired_at = step
            self._go(Phase.FIRING, step)
        elif self._hits and self._phase is not Phase.PENDING:
            self._go(Phase.PENDING, step)
        elif not self._hits and self._phase is Phase.PENDING:
            self._go(Phase.INACTIVE, step)

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


def _cause(change: Change) -> tuple[int, tuple[int, int], int]:
    assert change.finding is not None
    return likelihood(change.finding)
