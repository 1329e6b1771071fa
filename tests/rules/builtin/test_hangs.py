"""`training_hangs` fires when the training threads of all ranks stay at one line, and names the lines."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.rules.runs import all_at_once, follow, one_by_one
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.block import Block
from watchstep_rules.config.rule_config import RuleConfig

RULE = RuleConfig(rule="training_hangs")
RATE = tensor("optimizer:lr", "metrics", role="metric", shape=())
REDUCES, READS = "train.py:33 in step, in all_reduce (c10d.py:9)", "data.py:8 in read"


def run(stalls: Mapping[int, tuple[float, str]], ranks: int = 1, steps: int = 10) -> Block:
    """Ranks with a metric at each step, and at step 6 the seconds and places of those that do not move."""
    rows = []
    for step in range(steps):
        for rank in range(ranks):
            rows.append(Row(step, RATE, [0.1], worker=rank))
            if step == 6 and rank in stalls:
                seconds, place = stalls[rank]
                rows.append(
                    Row(
                        step,
                        tensor(f"training:stalled@{place}", "metrics", role="metric", shape=()),
                        [seconds],
                        worker=rank,
                    )
                )
    return block_of(rows)


def messages(block: Block) -> list[str]:
    return [finding.message for finding in all_at_once(RULE, block).findings]


def test_one_rank_that_does_not_move_is_reported_with_its_line() -> None:
    (message,) = messages(run({0: (130.0, REDUCES)}))
    assert message == f"no step has ended for 130 s, and no training thread moves: rank 0 at {REDUCES}"


def test_the_rank_that_waits_elsewhere_comes_first() -> None:
    stalls = {0: (131.0, REDUCES), 1: (130.0, REDUCES), 2: (135.0, READS)}
    (message,) = messages(run(stalls, ranks=3))
    assert message.endswith(
        f"for 135 s, and no training thread moves: rank 2 at {READS}; ranks 0, 1 at {REDUCES}"
    )


@pytest.mark.parametrize("stalls", [{}, {0: (130.0, REDUCES)}, {0: (130.0, REDUCES), 1: (100.0, READS)}])
def test_a_rank_that_moves_keeps_it_silent(stalls: Mapping[int, tuple[float, str]]) -> None:
    assert messages(run(stalls, ranks=2)) == []


def test_the_alert_ends_with_the_next_steps() -> None:
    block = run({0: (130.0, REDUCES)})
    outcome = follow(RULE, one_by_one(block))
    assert [finding.step for finding in outcome.findings] == [6]
    assert outcome.findings == all_at_once(RULE, block).findings
