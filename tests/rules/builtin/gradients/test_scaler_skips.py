from __future__ import annotations

from collections.abc import Iterable

from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep_rules.config.rule_config import RuleConfig

SKIPPED = tensor("gradient_scaler:skipped", "metrics", shape=())
OTHER = tensor("accuracy", "metrics", shape=())


def found(steps: Iterable[int], **params: int) -> list[int]:
    rows = [row for step in steps for row in (Row(step, OTHER, [1.0]), Row(step, SKIPPED, [1.0]))]
    outcome = all_at_once(RuleConfig(rule="scaler_skips", params=params), block_of(rows))
    return [finding.step for finding in outcome.findings]


def test_the_start_of_a_scaler_is_fine_and_one_that_does_not_end_is_found() -> None:
    assert found(range(17)) == []
    assert found(range(25)) == [19, 20, 21, 22, 23, 24]


def test_one_in_two_thousand_is_fine() -> None:
    assert found(range(0, 100_000, 2000)) == []


def test_every_other_step_is_too_many() -> None:
    assert found(range(0, 80, 2)) == list(range(38, 80, 2))
    assert found(range(0, 400, 8)) == []


def test_other_metrics_are_not_counted() -> None:
    block = block_of([Row(step, OTHER, [1.0]) for step in range(50)])
    assert all_at_once(RuleConfig(rule="scaler_skips"), block).findings == []


def test_the_message_states_how_many_of_how_many() -> None:
    rows = [Row(step, SKIPPED, [1.0]) for step in range(0, 9, 2)]
    outcome = all_at_once(RuleConfig(rule="scaler_skips", params={"skips": 5}), block_of(rows))
    assert outcome.findings[0].message.startswith(
        "gradient_scaler:skipped: 5 of the last 9 steps were skipped"
    )
