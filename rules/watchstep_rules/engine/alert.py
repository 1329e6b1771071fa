"""The life of an alert: inactive → pending → firing → resolved, over the rows of a run as they come.

An alert belongs to one rule config on one attempt of a run. It is pending while some tensor has findings but not yet
for as long as ``for`` asks; firing once one has; resolved when every tensor that made it fire has been judged clean for
as long as ``keep_firing`` asks.

It fires with the first rows that make it fire, and waits for no other worker. All else waits until the step is sealed, so that
what an alert says is what it would say if all rows came in order, a step at a time; `watchstep_rules.engine.alert_state_machine` is that
alert. Where rows that come later show that it fired at an earlier step, or for a likelier cause, it is revised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from watchstep_rules.config.rule_config import Timing
from watchstep_rules.engine.alert_memory import AlertMemory, Transition
from watchstep_rules.engine.alert_state_machine import ALL, Life, Seals
from watchstep_rules.engine.streaks import ClockTick, JudgedRows, follow
from watchstep_rules.finding_rows import steps_of, taken
from watchstep_rules.rule import Finding

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
