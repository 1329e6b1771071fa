"""Resolved episodes stay resolved: rows that arrive after the watermark of their steps start no second episode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.rules.runs import Event, Outcome, Rows, Watermark, follow
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase

NAN = RuleConfig(rule="non_finite_values")
LOSS = tensor("loss", "losses", role="loss", shape=())
STEPS = 10
LAST = Watermark(STEPS - 1)


def rank(worker: int, bad: frozenset[int], steps: Sequence[int] = range(STEPS)) -> Rows:
    """Rows of a rank whose loss is NaN at some steps."""
    return Rows(
        block_of([Row(step, LOSS, [math.nan if step in bad else 1.0], worker=worker) for step in steps])
    )


def lasting(steps: int) -> RuleConfig:
    return RuleConfig.model_validate(
        {"rule": "non_finite_values", "for": {"steps": steps}, "keep_firing": {"steps": steps}}
    )


def episodes(outcome: Outcome) -> list[tuple[str, int]]:
    return [
        (change.phase.value, change.step)
        for change in outcome.transitions
        if change.phase in (Phase.FIRING, Phase.RESOLVED) and not change.revised
    ]


def alone(bad: frozenset[int], watermark: int = STEPS - 1) -> list[list[Event]]:
    """Rank 0, and a watermark that passes steps without the other ranks."""
    return [[rank(0, bad, range(watermark + 1)), Watermark(watermark)]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_episode_of_all_ranks_is_reported_once_though_one_of_them_lags(order: tuple[int, int]) -> None:
    first, second = (rank(worker, frozenset({4, 5})) for worker in order)
    expected = [("firing", 4), ("resolved", 6)]
    assert episodes(follow(NAN, [[first], [second, LAST]])) == expected
    assert episodes(follow(NAN, [[first, LAST], [second]])) == expected


def test_while_a_rank_can_still_come_the_episode_continues() -> None:
    outcome = follow(NAN, [[rank(0, frozenset({4}))], [rank(1, frozenset({4, 5, 6, 7})), LAST]])
    assert episodes(outcome) == [("firing", 4), ("resolved", 8)]


def test_a_rank_that_was_given_up_and_was_bad_for_longer_causes_no_notification() -> None:
    outcome = follow(NAN, [*alone(frozenset({4})), [rank(1, frozenset({4, 5, 6, 7}))]])
    assert episodes(outcome) == [("firing", 4), ("resolved", 5)]
    assert outcome.memory.alert.phase is Phase.RESOLVED


def test_what_is_bad_beyond_all_that_was_sealed_without_it_is_reported() -> None:
    back = rank(1, frozenset(range(4, 9)))
    outcome = follow(
        NAN, [*alone(frozenset({4}), watermark=6), [back], [rank(0, frozenset(), range(7, 10)), LAST]]
    )
    assert episodes(outcome) == [("firing", 4), ("resolved", 5), ("firing", 7), ("resolved", 9)]
    parts = [rank(1, frozenset(range(4, 9)), range(step, step + 1)) for step in range(10)]
    rest: list[list[Event]] = [[rank(0, frozenset(), range(7, 10)), LAST]]
    assert episodes(
        follow(NAN, [*alone(frozenset({4}), watermark=6), *([part] for part in parts), *rest])
    ) == episodes(outcome)


def test_a_rank_that_stays_behind_and_bad_is_not_silenced_for_ever() -> None:
    evaluations = alone(frozenset({4}), watermark=6)
    for step in range(4, 9):  # the watermark passes each step of rank 1 before its row arrives
        evaluations.append([rank(0, frozenset(), range(step + 3, step + 4)), Watermark(step + 3)])
        evaluations.append([rank(1, frozenset(range(4, 9)), range(step, step + 1))])
    assert episodes(follow(NAN, evaluations)) == [("firing", 4), ("resolved", 5), ("firing", 8)]


def test_an_unreported_fault_is_reported_however_late() -> None:
    outcome = follow(NAN, [*alone(frozenset({2})), [rank(1, frozenset({6, 7}))]])
    assert episodes(outcome) == [("firing", 2), ("resolved", 3), ("firing", 6), ("resolved", 8)]


def test_a_segment_that_comes_after_later_ones_of_its_rank_ends_nothing() -> None:
    bad = frozenset({7, 8, 9})
    early, late = rank(0, bad, range(4)), rank(0, bad, range(4, 7))
    outcome = follow(NAN, [[early, rank(0, bad, range(7, 10)), LAST], [late]])
    assert episodes(outcome) == [("firing", 7)]
    assert outcome.memory.alert.phase is Phase.FIRING


def test_what_such_a_segment_holds_is_reported_once() -> None:
    def begun(bad: frozenset[int]) -> list[Event]:
        return [rank(0, bad, range(4)), rank(0, bad, range(7, 9)), Watermark(8)]

    late: list[list[Event]] = [
        [rank(0, frozenset({5}), range(4, 7))],
        [rank(0, frozenset(), range(9, 10)), LAST],
    ]
    over = [("firing", 1), ("resolved", 2)]
    resumed = follow(NAN, [begun(frozenset({1})), *late])
    assert episodes(resumed) == [*over, ("firing", 5), ("resolved", 6)]
    joined = follow(NAN, [begun(frozenset({1, 8})), *late])
    assert episodes(joined) == [*over, ("firing", 8), ("resolved", 9)]
    assert [change.step for change in joined.transitions if change.revised] == [5]


def test_late_findings_make_nothing_pending_either() -> None:
    parts: list[list[Event]] = [[rank(0, frozenset({4, 5})), LAST], [rank(1, frozenset({4}), range(5))]]
    assert [change.phase.value for change in follow(lasting(2), parts).transitions] == [
        "pending",
        "firing",
        "resolved",
    ]


bad_steps = st.frozensets(st.integers(0, STEPS - 1), max_size=6)


@settings(max_examples=60)
@given(bad_steps, st.integers(1, 3))
def test_late_ranks_report_the_same_episodes_in_any_order(bad: frozenset[int], steps: int) -> None:
    """Ranks with equal findings, as of reduced gradients; the watermark passes the steps of each before the next arrives."""
    ranks = [rank(worker, bad) for worker in range(3)]
    expected = episodes(follow(lasting(steps), [[ranks[0], LAST]]))
    event(f"episodes: {len(expected)}")
    for order in permutations(ranks):
        assert (
            episodes(follow(lasting(steps), [[order[0], LAST], *([part] for part in order[1:])])) == expected
        )


@settings(max_examples=60)
@given(st.lists(bad_steps, min_size=2, max_size=3), st.integers(1, 3), st.data())
def test_no_episode_begins_within_another(bad: list[frozenset[int]], steps: int, data: st.DataObject) -> None:
    """Ranks with different findings arrive in any order, each in its own order, and with any watermarks."""
    width = data.draw(st.integers(1, STEPS))
    turns = data.draw(st.permutations([worker for worker in range(len(bad)) for _ in range(0, STEPS, width)]))
    begun = dict.fromkeys(range(len(bad)), 0)
    evaluations: list[list[Event]] = []
    for worker in turns:
        first = begun[worker]
        begun[worker] = min(STEPS, first + width)
        watermarks = [Watermark(max(begun.values()) - 1)] if data.draw(st.booleans()) else []
        evaluations.append([rank(worker, bad[worker], range(first, begun[worker])), *watermarks])
    outcome = follow(lasting(steps), [*evaluations, [LAST]])
    over = -1
    for phase, step in episodes(outcome):
        if phase == "firing":
            assert step >= over
        else:
            over = max(over, step)
    event(f"episodes: {len(episodes(outcome)) // 2}")
