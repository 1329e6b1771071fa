from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rules.runs import in_steps, norms
from watchstep.format.block import Block
from watchstep_rules.builtin.system.stalled_training import (
    StalledTraining,
    StalledTrainingParams,
    StalledTrainingState,
)
from watchstep_rules.rule import Finding

RULE = StalledTraining()
PARAMS = StalledTrainingParams()
SECOND = 1_000_000_000
START = 10 * SECOND
Tick = tuple[float, int]
"""Seconds since the start, and how many rows came."""


def rows(count: int, first: int = 0) -> Block:
    return in_steps(norms("a", [1.0] * count, first=first)) if count else Block.empty()


def followed(
    ticks: Sequence[Tick], params: StalledTrainingParams = PARAMS, *, parts: int = 1
) -> tuple[StalledTrainingState, list[tuple[int, Finding]]]:
    """The state after ticks, and the findings with their seconds; each tick's rows in so many parts."""
    state, reported, step = StalledTrainingState(), [], 0
    for second, count in ticks:
        now = START + round(second * SECOND)
        block = rows(count, step)
        step += count
        cuts = [round(len(block) * part / parts) for part in range(parts + 1)]
        for start, end in pairwise(cuts) if count else [(0, 0)]:
            part = block.where((block.step >= step - count + start) & (block.step < step - count + end))
            if count and not len(part):
                continue
            state, findings = RULE.evaluate(params, state, Block.empty(), part, now)
            reported += [(round(second), finding) for finding in findings]
    return state, reported


def watched(until: float, *, since: float = 0, every: float = 300) -> list[Tick]:
    """Ticks without rows."""
    return [(since + every * place, 0) for place in range(1, round((until - since) / every) + 1)]


def times(ticks: Sequence[Tick], params: StalledTrainingParams = PARAMS) -> list[int]:
    return [second for second, _ in followed(ticks, params)[1]]


def test_a_training_that_stalls_is_reported_and_one_that_continues_is_not() -> None:
    begun: list[Tick] = [(0, 3), (60, 3)]
    _, reported = followed([*begun, *watched(1860, since=60)])
    assert [(second, finding.step, finding.tensor) for second, finding in reported] == [(1860, 5, "")]
    assert reported[0][1].message == (
        "nothing was recorded for 1800 s, since step 5, 1800 s tolerated; the longest earlier pause took 60 s"
    )
    assert times([*begun, *[(60.0 * minute, 1) for minute in range(2, 200)]]) == []
    assert times([*begun, *watched(1560, since=60), (1700, 1), *watched(3400, since=1700)]) == []


def test_a_silence_is_reported_as_long_as_it_lasts() -> None:
    begun: list[Tick] = [(0, 1), (10, 1)]
    assert times([*begun, *watched(2410, since=10)]) == [1810, 2110, 2410]
    assert times([*begun, *watched(1810, since=10), (1900, 1), (2000, 0)]) == [1810]


def test_a_pause_that_the_run_came_back_from_is_no_stall_again() -> None:
    hour = 3600.0
    first: list[Tick] = [(0, 1), (10, 1), *watched(3310, since=10), (hour, 1)]
    assert times(first) == list(range(1810, 3600, 300))
    again = watched(2 * hour, since=hour)
    assert times([*first, *again]) == times(first)
    assert times([*first, *watched(hour + 7300, since=hour)])[-1] > hour + 7000


def test_time_without_evaluations_is_not_a_stall() -> None:
    slept: list[Tick] = [(0, 1), (10, 1), (90_000, 0), (90_300, 0)]
    assert times(slept) == []
    assert followed(slept)[0].silent_ns == (600 + 300) * SECOND


def test_an_old_run_is_judged_only_after_a_fresh_row() -> None:
    late = 10_000.0
    assert times([(late, 3), *watched(late + 9000, since=late)]) == []
    state, _ = followed([(late, 3)])
    assert not state.live
    assert RULE.due_ns(PARAMS, state) is None


def test_an_attempt_that_wrote_nothing_is_silent_since_it_was_first_seen() -> None:
    _, reported = followed([(5, 0), *watched(1805, since=5)])
    assert [(second, finding.step) for second, finding in reported] == [(1805, -1)]
    assert "since the attempt began" in reported[0][1].message


def test_ticks_are_requested_often_enough_and_not_for_ever() -> None:
    assert RULE.due_ns(PARAMS, StalledTrainingState()) == 300 * SECOND  # long ago: at once
    state, second = followed([(0, 1)])[0], 0.0
    ticks: list[Tick] = [(0, 1)]
    while (due := RULE.due_ns(PARAMS, state)) is not None:
        second = (due - START) / SECOND
        ticks.append((second, 0))
        state, _ = followed(ticks)
    assert second == 4 * 1800
    assert times(ticks)[0] == 1800
    assert len(ticks) == 1 + 4 * 6
    nearly = followed([(0, 1), *watched(1500), (1790, 0)])[0]
    assert RULE.due_ns(PARAMS, nearly) == START + 1800 * SECOND


@pytest.mark.parametrize("seconds", [30.0, 7200.0])
def test_the_threshold_is_in_seconds(seconds: float) -> None:
    params = StalledTrainingParams(threshold=seconds)
    ticks = watched(3 * seconds, every=seconds / 6)
    assert times([(0, 1), *ticks], params)[0] == round(seconds)


@given(
    st.lists(st.tuples(st.sampled_from([1, 200, 700, 5000]), st.integers(0, 3)), max_size=12),
    st.integers(1, 3),
)
def test_splitting_the_rows_of_a_tick_changes_no_finding(gaps: list[tuple[int, int]], parts: int) -> None:
    ticks, second = [], 0
    for gap, count in gaps:
        second += gap
        ticks.append((float(second), count))
    assert followed(ticks, parts=parts) == followed(ticks)
