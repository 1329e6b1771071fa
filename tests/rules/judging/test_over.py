"""What is over stays over: rows of its steps that come later, of a rank that lags, start no second episode."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.rules.runs import Event, Rows, Said, follow
from tests.sdk.blocks import Row, block_of, tensor
from watchstep_rules.config import RuleConfig
from watchstep_rules.judging.alert import Phase
from watchstep_rules.judging.judge import RuleMemory

NAN = RuleConfig(rule="nan_or_inf")
LOSS = tensor("loss", "losses", role="loss", shape=())
STEPS = 10


def rank(worker: int, bad: frozenset[int], steps: Sequence[int] = range(STEPS)) -> Rows:
    """Rows of a rank whose loss is NaN at some steps."""
    return Rows(
        block_of([Row(step, LOSS, [math.nan if step in bad else 1.0], worker=worker) for step in steps])
    )


def lasting(steps: int) -> RuleConfig:
    return RuleConfig.model_validate(
        {"rule": "nan_or_inf", "for": {"steps": steps}, "keep_firing": {"steps": steps}}
    )


def told(said: Said) -> list[tuple[str, int]]:
    return [
        (change.phase.value, change.step)
        for change in said.transitions
        if change.phase in (Phase.FIRING, Phase.RESOLVED) and not change.revised
    ]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_episode_of_all_ranks_is_told_once_though_one_of_them_lags(order: tuple[int, int]) -> None:
    said = follow(NAN, [[rank(worker, frozenset({4, 5}))] for worker in order])
    assert told(said) == [("firing", 4), ("resolved", 6)]
    assert said.memory.alert.phase is Phase.RESOLVED


def test_a_rank_that_is_still_bad_after_what_is_over_starts_the_next_episode() -> None:
    lagging = rank(1, frozenset({4, 5, 6, 7}))
    said = follow(NAN, [[rank(0, frozenset({4}))], [lagging]])
    assert told(said) == [("firing", 4), ("resolved", 5), ("firing", 6), ("resolved", 8)]
    changed = [change for change in said.transitions if change.step == 6]
    assert [(change.since_step, change.finding and change.finding.worker) for change in changed] == [(4, 1)]


def test_steps_of_an_episode_are_over_though_a_rank_that_was_behind_ends_it() -> None:
    """Rank 0 was bad until 7; rank 1, whose rows come last, recovered at 5."""
    parts = [
        rank(0, frozenset({4}), range(5)),
        rank(1, frozenset({4}), range(5)),
        rank(0, frozenset({5, 6, 7}), range(5, 10)),
        rank(1, frozenset(), range(5, 6)),
        rank(2, frozenset({6, 7})),
    ]
    assert told(follow(NAN, [[one] for one in parts])) == [("firing", 4), ("resolved", 5)]


def test_late_findings_make_nothing_pending_either() -> None:
    parts = [rank(0, frozenset({4, 5})), rank(1, frozenset({4}), range(5))]
    assert [change.phase.value for change in follow(lasting(2), [[one] for one in parts]).transitions] == [
        "pending",
        "firing",
        "resolved",
    ]


def test_a_memory_of_before_loads_and_lives_on() -> None:
    memory = follow(NAN, [[rank(0, frozenset({4}), range(5))]]).memory
    kept = json.loads(memory.model_dump_json())
    del kept["alert"]["closed"]
    before = RuleMemory.model_validate(kept)
    said = follow(NAN, [[rank(0, frozenset(), range(5, 7)), rank(1, frozenset({3}), range(7))]], before)
    assert told(said) == [("resolved", 5)]


bad_steps = st.frozensets(st.integers(0, STEPS - 1), max_size=6)


@settings(max_examples=60)
@given(bad_steps, st.integers(1, 3))
def test_in_whichever_order_ranks_come_they_tell_of_the_same_episodes(
    bad: frozenset[int], steps: int
) -> None:
    """Ranks that see the same, as of reduced gradients."""
    ranks = [rank(worker, bad) for worker in range(3)]
    alone = told(follow(lasting(steps), [[ranks[0]]]))
    event(f"episodes: {len(alone)}")
    for order in permutations(ranks):
        assert told(follow(lasting(steps), [[one] for one in order])) == alone


@settings(max_examples=150)
@given(st.lists(bad_steps, min_size=2, max_size=3), st.integers(1, 3), st.data())
def test_no_episode_begins_within_another(bad: list[frozenset[int]], steps: int, data: st.DataObject) -> None:
    """However the segments of ranks that see different things come, each rank's in their order."""
    width = data.draw(st.integers(1, STEPS))
    turns = data.draw(st.permutations([worker for worker in range(len(bad)) for _ in range(0, STEPS, width)]))
    begun = dict.fromkeys(range(len(bad)), 0)
    segments: list[Event] = []
    for worker in turns:
        first = begun[worker]
        begun[worker] = min(STEPS, first + width)
        segments.append(rank(worker, bad[worker], range(first, begun[worker])))
    said = follow(lasting(steps), [[one] for one in segments])
    assert follow(lasting(steps), [segments]).transitions == said.transitions
    over = -1
    for phase, step in told(said):
        if phase == "firing":
            assert step > over
        else:
            over = max(over, step)
    event(f"episodes: {len(told(said)) // 2}")
