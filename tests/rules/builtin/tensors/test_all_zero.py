from __future__ import annotations

import pytest

from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, Values, block_of, gradient, tensor
from watchstep.format.tensors import Placement, TensorInfo
from watchstep_rules.config.rule_config import RuleConfig

OUTPUT = tensor("first:output", "activations")


def found(rows: list[Row], **params: object) -> list[int]:
    outcome = all_at_once(RuleConfig(rule="all_zero", params=params), block_of(rows))
    return [finding.step for finding in outcome.findings]


@pytest.mark.parametrize(
    "info", [OUTPUT, gradient("a"), tensor("a.weight", "weights"), tensor("x:input", "inputs")]
)
@pytest.mark.parametrize(("values", "steps"), [([0.0, 0.0, -0.0], [3]), ([0.0, 0.0, 1e-30], []), ([], [])])
def test_every_element_must_be_zero(info: TensorInfo, values: Values, steps: list[int]) -> None:
    assert found([Row(3, info, values)]) == steps


def test_a_share_can_be_requested() -> None:
    rows = [Row(0, OUTPUT, [0.0, 0.0, 0.0, 1.0]), Row(1, OUTPUT, [0.0, 0.0, 1.0, 1.0])]
    assert found(rows, share=0.75) == [0]


def test_nan_is_no_zero() -> None:
    assert found([Row(0, OUTPUT, [0.0, float("nan")])]) == []


def test_of_shards_the_whole_tensor_is_judged() -> None:
    halves = [
        Row(0, gradient("a"), values, worker=at, place=Placement(at, 2))
        for at, values in enumerate(([0.0], [1.0]))
    ]
    assert found(halves) == []


def test_the_message_states_how_many() -> None:
    outcome = all_at_once(RuleConfig(rule="all_zero"), block_of([Row(0, OUTPUT, [0.0] * 4)]))
    assert outcome.findings[0].message == (
        "100.0% of the 4 elements of first:output are zero, the limit is 100.0%"
    )
