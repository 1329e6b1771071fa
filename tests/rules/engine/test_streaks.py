"""Alerts computed over columns equal those of a loop over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.rules.engine.reference_alert import PlainAlert
from tests.sdk.format.blocks import Row, block_of, gradient
from watchstep.format.block import Block
from watchstep.format.tensors import Mode
from watchstep_rules.config.rule_config import Timing
from watchstep_rules.engine import alert
from watchstep_rules.engine.alert import AlertMemory, Phase, Transition, advance
from watchstep_rules.engine.streaks import ClockTick, JudgedRows
from watchstep_rules.rule import Finding, finding_at, finding_of_run

INFOS = [gradient(name, order=order) for order, name in enumerate("abc")]
MODES: tuple[Mode, ...] = ("train", "eval")


@dataclass(frozen=True)
class Group:
    """The rows of a worker's step: its layers in order, whether each has a finding, and the time."""

    step: int
    worker: int
    mode: Mode
    layers: tuple[tuple[int, bool], ...]
    time_ns: int
    run: bool
    conclusive: bool = True


groups = st.lists(
    st.builds(
        Group,
        st.integers(0, 9),
        st.integers(0, 1),
        st.sampled_from(MODES),
        st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=4).map(tuple),
        st.integers(0, 20),
        st.booleans(),
        st.booleans(),
    ),
    max_size=24,
)
timings = st.builds(
    Timing, st.integers(1, 3), st.sampled_from([0, 0, 4, 9]), st.integers(1, 3), st.sampled_from([0, 0, 4, 9])
)


def judged(parts: Sequence[Group]) -> tuple[JudgedRows, list[Finding]]:
    """The rows of some groups, with their findings; a layer listed twice as bad in a group has two findings."""
    rows = [
        Row(part.step, INFOS[layer], [1.0], part.mode, part.worker)
        for part in parts
        for layer, _ in part.layers
    ]
    block = block_of(rows)
    times = [part.time_ns for part in parts for _ in part.layers]
    block = replace(block, time_ns=np.array(times, np.int64))
    bad = [hit for part in parts for _, hit in part.layers]
    findings = [
        finding_at("test", block, row, value=float(row), threshold=0.0, message="bad")
        for row, hit in enumerate(bad)
        if hit
    ]
    about = [
        finding_of_run("test", part.step, 0, value=1, threshold=0, message="") for part in parts if part.run
    ]
    conclusive = np.array([part.conclusive for part in parts for _ in part.layers], np.bool_)
    return JudgedRows.of(block, conclusive), findings + about


def persisted(memory: AlertMemory) -> AlertMemory:
    again = AlertMemory.model_validate_json(memory.model_dump_json())
    assert again == memory
    return again


def without_run(parts: list[Group]) -> list[Group]:
    return [replace(part, run=False) for part in parts]


@settings(max_examples=examples(250))
@given(groups, timings, st.booleans())
def test_an_alert_over_columns_equals_a_loop_over_rows(
    parts: list[Group], timing: Timing, about_run: bool
) -> None:
    parts = parts if about_run else without_run(parts)
    plain = PlainAlert(timing)
    rows, findings = judged(parts)
    plain.judge(rows, findings)
    memory, transitions = advance(AlertMemory(), timing, rows, findings)
    event(f"transitions: {min(6, len(transitions))}")
    assert transitions == plain.transitions
    assert (memory.phase, memory.finding, memory.streak) == (plain.phase, plain.finding, plain.since)
    assert set(memory.finding_streaks) == {name for name, series in plain.series.items() if series.bad}
    assert (set(memory.series_with_findings), set(memory.firing_series)) == (plain.bad, plain.firing)
    assert set(memory.clean_streaks) >= plain.firing
    assert (memory.closed_to, memory.queued_changes, memory.causes) == (plain.closed, (), ())


@settings(max_examples=examples(250))
@given(groups, timings, st.data())
def test_the_split_into_groups_does_not_matter(
    parts: list[Group], timing: Timing, data: st.DataObject
) -> None:
    parts = without_run(list({(part.step, part.worker, part.mode): part for part in parts}.values()))
    parts.sort(key=lambda part: part.step)
    steps = [part.step for part in parts]
    places = data.draw(st.sets(st.sampled_from(steps), max_size=5)) if steps else set()
    cuts = sorted({steps.index(step) for step in places} | {0, len(parts)})
    memory, transitions = AlertMemory(), []
    for start, end in pairwise(cuts):
        memory, more = advance(persisted(memory), timing, *judged(parts[start:end]))
        transitions += more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alert, "PART_ROWS", data.draw(st.integers(1, 20)))
        in_parts = advance(AlertMemory(), timing, *judged(parts))
    assert in_parts == advance(AlertMemory(), timing, *judged(parts))
    whole, at_once = advance(AlertMemory(), timing, *judged(parts))
    at_once = [replace(change, finding=plainly(change.finding)) for change in at_once]
    assert [replace(change, finding=plainly(change.finding)) for change in transitions] == at_once
    assert without_value(memory) == without_value(whole)


@settings(max_examples=examples(150))
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 30)), max_size=12), timings)
def test_a_rule_that_watches_the_clock_is_judged_at_each_tick(
    ticks: list[tuple[bool, bool, int]], timing: Timing
) -> None:
    plain, memory = PlainAlert(timing), AlertMemory()
    transitions: list[Transition] = []
    for step, (silent, with_rows, now) in enumerate(ticks):
        part = Group(step, 0, "train", ((0, False),), now, run=False)
        rows = judged([part])[0] if with_rows else JudgedRows.of(Block.empty())
        findings = [finding_of_run("test", step, now, value=1, threshold=0, message="")] if silent else []
        tick = ClockTick(step, now)
        plain.judge(rows, findings, tick)
        memory, more = advance(persisted(memory), timing, rows, findings, tick)
        transitions += more
    assert transitions == plain.transitions
    assert memory.phase is plain.phase


def test_an_alert_of_a_clock_fires_while_the_last_evaluation_reports_it() -> None:
    memory, seen = AlertMemory(), []
    for now, silent in enumerate([False, True, True, False, True]):
        findings = [finding_of_run("stalled", 3, now, value=1, threshold=0, message="")] if silent else []
        memory, more = advance(
            memory, Timing(5, 0, 5), JudgedRows.of(Block.empty()), findings, ClockTick(3, now)
        )
        seen += [(now, change.phase, change.since_ns) for change in more]
    assert seen == [(1, Phase.FIRING, 1), (3, Phase.RESOLVED, 1), (4, Phase.FIRING, 4)]


@pytest.mark.parametrize(("seconds", "fires"), [(0, 1), (5, 6), (9, 10)])
def test_seconds_are_those_of_the_rows(seconds: int, fires: int) -> None:
    """Two steps in a row and so many seconds: the first bad row is at second 1, a row a second."""
    parts = [Group(step, 0, "train", ((0, step > 0),), step * 10**9, run=False) for step in range(12)]
    _, transitions = advance(AlertMemory(), Timing(1, seconds * 10**9), *judged(parts))
    assert [(change.phase, change.step, change.since_step) for change in transitions][-1] == (
        Phase.FIRING,
        fires,
        1,
    )


def test_where_there_are_no_findings_nothing_is_checked() -> None:
    memory = AlertMemory()
    assert advance(memory, Timing(), judged([Group(0, 0, "train", ((0, False),), 0, run=False)])[0], []) == (
        memory,
        [],
    )


def plainly(finding: Finding | None) -> Finding | None:
    """Without the number of its row in the block."""
    return finding and finding.model_copy(update={"value": 0.0})


def without_value(memory: AlertMemory) -> AlertMemory:
    return memory.model_copy(update={"finding": plainly(memory.finding)})
