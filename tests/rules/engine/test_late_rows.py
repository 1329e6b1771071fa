"""Alerts report the same episodes for any order and split of the ranks' rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.rules.runs import Event, Outcome, Rows, Watermark, follow
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine import alert
from watchstep_rules.engine.alert import Phase, coalesce
from watchstep_rules.engine.judge import RuleHealth

LOSS = tensor("loss", "losses", role="loss", shape=())
OTHER = tensor("other", "losses", role="loss", shape=())
STEPS = 12
SECOND = 10**9

Bad = frozenset[int]
"""Steps at which a series is NaN."""


@dataclass(frozen=True)
class Rank:
    """What a rank records of two losses."""

    worker: int
    bad: tuple[Bad, Bad]

    def rows(self, steps: Sequence[int]) -> list[Row]:
        return [
            Row(step, info, [math.nan if step in bad else 1.0], worker=self.worker)
            for step in steps
            for info, bad in zip((LOSS, OTHER), self.bad, strict=True)
        ]


def lasting(hold: int, keep: int) -> RuleConfig:
    return RuleConfig.model_validate(
        {"rule": "non_finite_values", "for": {"steps": hold}, "keep_firing": {"steps": keep}}
    )


def episodes(outcome: Outcome) -> list[tuple[str, int]]:
    """The notified changes, coalesced with their revisions."""
    return [
        (change.phase.value, change.step)
        for change in coalesce(outcome.transitions)
        if change.phase in (Phase.FIRING, Phase.RESOLVED)
    ]


def notifications(outcome: Outcome) -> int:
    """The number of firing notifications."""
    return sum(change.phase is Phase.FIRING and not change.revised for change in outcome.transitions)


def calm(config: RuleConfig, ranks: Sequence[Rank]) -> Outcome:
    """All rows in order, a step at a time; the watermark passes a step when all of its rows are there."""
    return follow(
        config,
        [
            [Rows(block_of([row for rank in ranks for row in rank.rows([step])])), Watermark(step)]
            for step in range(STEPS)
        ],
    )


bad_steps = st.frozensets(st.integers(0, STEPS - 1), max_size=8)
some_ranks = st.lists(st.tuples(bad_steps, bad_steps), min_size=1, max_size=3).map(
    lambda bad: [Rank(worker, series) for worker, series in enumerate(bad)]
)


@dataclass(frozen=True)
class Segment:
    """Steps of a rank, in one piece."""

    worker: int
    first: int
    end: int


Turn = Segment | Watermark


@st.composite
def arrivals(draw: st.DrawFn, number: int) -> list[list[Turn]]:
    """Segments of each rank in order, ranks interleaved at random, in evaluations; the watermark may lag."""
    begun = dict.fromkeys(range(number), 0)
    evaluations: list[list[Turn]] = [[]]
    while waiting := [worker for worker, steps in begun.items() if steps < STEPS]:
        worker = draw(st.sampled_from(waiting))
        first = begun[worker]
        begun[worker] = end = draw(st.integers(first + 1, STEPS))
        evaluations[-1].append(Segment(worker, first, end))
        passed = min(begun.values()) - 1
        if passed >= 0 and draw(st.booleans()):
            evaluations[-1].append(Watermark(passed))
        if draw(st.booleans()):
            evaluations.append([])
    return [*evaluations, [Watermark(STEPS - 1)]]


def judged(config: RuleConfig, ranks: Sequence[Rank], evaluations: Sequence[Sequence[Turn]]) -> Outcome:
    def came(turn: Turn) -> Event:
        if isinstance(turn, Watermark):
            return turn
        return Rows(block_of(ranks[turn.worker].rows(range(turn.first, turn.end))))

    return follow(config, [[came(turn) for turn in turns] for turns in evaluations])


@settings(max_examples=examples(16))
@given(some_ranks, st.integers(1, 3), st.integers(1, 3), st.data())
def test_the_same_episodes_in_whichever_order_and_cuts_rows_come(
    ranks: list[Rank], hold: int, keep: int, data: st.DataObject
) -> None:
    config = lasting(hold, keep)
    expected = calm(config, ranks)
    outcome = judged(config, ranks, data.draw(arrivals(len(ranks))))
    event(f"episodes: {notifications(expected)}")
    assert episodes(outcome) == episodes(expected)
    assert notifications(outcome) == notifications(expected)
    assert outcome.memory.alert.finding == expected.memory.alert.finding


@settings(max_examples=examples(16))
@given(some_ranks, st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.data())
def test_where_too_much_waits_for_a_rank_nobody_is_notified_twice_of_a_step(
    ranks: list[Rank], hold: int, keep: int, most: int, data: st.DataObject
) -> None:
    config = lasting(hold, keep)
    turns = data.draw(arrivals(len(ranks)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(alert, "MAX_QUEUED_CHANGES", most)
        outcome = judged(config, ranks, turns)
        stalled = judged(
            config, ranks, [[turn for turn in some if isinstance(turn, Segment)] for some in turns]
        )
    assert len(stalled.memory.alert.queued_changes) <= most
    for judged_outcome in (outcome, stalled):
        assert judged_outcome.memory.health is not RuleHealth.ERROR, judged_outcome.memory.problem
        expected = episodes(judged_outcome)
        assert [phase for phase, _ in expected] == ["firing", "resolved"] * (len(expected) // 2) + [
            "firing"
        ] * (len(expected) % 2)
        for (_, resolved), (_, fired) in zip(expected[1::2], expected[2::2], strict=False):
            assert fired > resolved


@pytest.mark.ci
def test_what_waits_for_a_rank_that_stalls_is_bounded() -> None:
    infos = [tensor(f"loss.{number}", "losses", role="loss", shape=()) for number in range(100)]
    blocks = [
        block_of(
            [
                Row(step, info, [math.nan if (step + place) % 2 else 1.0])
                for step in range(first, first + 50)
                for place, info in enumerate(infos)
            ]
        )
        for first in range(0, 400, 50)
    ]
    outcome = follow(lasting(1, 1), [[Rows(block)] for block in blocks])
    assert len(outcome.memory.alert.queued_changes) <= alert.MAX_QUEUED_CHANGES
    assert len(outcome.memory.model_dump_json()) < 100 * alert.MAX_QUEUED_CHANGES
    assert notifications(outcome) == 1
