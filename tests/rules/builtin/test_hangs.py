"""`training_hangs` fires when the training threads of all ranks stay at one line, and names the lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.rules.runs import Event, Outcome, Rows, Watermark, follow
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep_rules.config.rule_config import RuleConfig

LOSS = tensor("loss", "losses", role="loss", shape=())
REDUCES, READS = "train.py:33 in step, in all_reduce (c10d.py:9)", "data.py:8 in read"


def steps(first: int, last: int, ranks: int = 1) -> list[Event]:
    """The rows of steps of some ranks, and the watermark after them."""
    rows = [Row(step, LOSS, [0.1], worker=rank) for step in range(first, last + 1) for rank in range(ranks)]
    return [Rows(block_of(rows)), Watermark(last)]


def stall(rank: int, seconds: float = 130.0, place: str = REDUCES, step: int = 5) -> list[Event]:
    """The report of a rank that does not move, at the last step that it has handed over."""
    info = tensor(f"training:stalled@{place}", "metrics", role="metric", shape=())
    return [Rows(block_of([Row(step, info, [seconds], worker=rank)]))]


def outcome(evaluations: Sequence[Sequence[Event]], **params: float) -> Outcome:
    return follow(RuleConfig(rule="training_hangs", params=params), evaluations)


def messages(*evaluations: Sequence[Event], **params: float) -> list[str]:
    return [finding.message for finding in outcome(evaluations, **params).findings]


def test_one_rank_that_does_not_move_is_reported_with_its_line_until_steps_end_again() -> None:
    run = outcome([steps(0, 5), stall(0), stall(0, 190.0), steps(6, 9)])
    assert [finding.message for finding in run.findings] == [
        f"no step has ended for {seconds} s, and no training thread moves: rank 0 at {REDUCES}"
        for seconds in (130, 190)
    ]
    assert [(change.phase.value, change.step) for change in run.notified] == [("firing", 5), ("resolved", 6)]


def test_the_rank_that_waits_elsewhere_comes_first() -> None:
    reports = [stall(0, 131.0), stall(1, 130.0), stall(2, 135.0, READS)]
    (message,) = messages(steps(0, 5, ranks=3), *reports)
    assert (
        message
        == f"no step has ended for 135 s, and no training thread moves: rank 2 at {READS}; ranks 0, 1 at {REDUCES}"
    )


def test_ranks_may_be_at_different_steps_and_report_at_different_times() -> None:
    begun: list[list[Event]] = [steps(0, 4, ranks=2), [Rows(block_of([Row(5, LOSS, [0.1], worker=0)]))]]
    assert messages(*begun, stall(0), [Watermark(5)], stall(1, step=4)) != []


@pytest.mark.parametrize(
    "reports",
    [[], [stall(0)], [stall(0), stall(1, 100.0)], [stall(0), steps(6, 6, ranks=2), stall(1, step=6)]],
)
def test_a_rank_that_moves_keeps_it_silent(reports: Sequence[Sequence[Event]]) -> None:
    assert messages(steps(0, 5, ranks=2), *reports) == []


@pytest.mark.parametrize(("seconds", "fires"), [(600.0, True), (700.0, False)])
def test_a_longer_time_is_waited_for(seconds: float, fires: bool) -> None:
    assert bool(messages(steps(0, 5), stall(0, 125.0), stall(0, 605.0), seconds=seconds)) == fires


def test_a_report_changes_nothing_that_another_rule_says() -> None:
    """The step that did not end has its rows after all."""
    sums = tensor("w:checksum", "checksums", role="checksum", shape=())
    differ: Mapping[int, float] = {0: 1.0, 1: 2.0}
    late: list[Event] = [
        Rows(block_of([Row(6, sums, [value], worker=rank) for rank, value in differ.items()])),
        Watermark(6),
    ]
    config = RuleConfig(rule="replica_divergence")
    without = follow(config, [steps(0, 5, ranks=2), late])
    reported = follow(config, [steps(0, 5, ranks=2), stall(0), stall(1), late])
    assert [finding.step for finding in without.findings] == [6]
    assert reported.findings == without.findings
