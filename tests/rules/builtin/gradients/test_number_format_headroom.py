from __future__ import annotations

from typing import Any

import pytest

from tests.rules.runs import all_at_once, steps_of
from tests.sdk.format.blocks import Row, Values, block_of, gradient, tensor
from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.rule_config import RuleConfig

GRADIENT, OUTPUT = gradient("a"), tensor("a:output", "activations")
SCALE = tensor("gradient_scaler:scale", "metrics", shape=())


def found(rows: list[Row], name: str = GRADIENT.name, **params: Any) -> list[int]:
    return steps_of(
        all_at_once(RuleConfig(rule="number_format_headroom", params=params), block_of(rows)), name
    )


@pytest.mark.parametrize(
    ("number_format", "lost", "representable"),
    [("fp16", 2.0**-25, 2.0**-24), ("bf16", 2.0**-134, 2.0**-133), ("fp8_e4m3", 2.0**-10, 2.0**-9)],
)
def test_what_is_below_the_smallest_number_is_lost(
    number_format: str, lost: float, representable: float
) -> None:
    rows = [Row(0, GRADIENT, [representable] * 20), Row(1, GRADIENT, [*[representable] * 18, lost, lost])]
    assert found(rows, number_format=number_format) == [1]
    assert found(rows, number_format=number_format, max_underflow=0.1) == []


@pytest.mark.parametrize(("values", "steps"), [([65000.0, 1.0], []), ([66000.0, 1.0], [0])])
def test_one_number_above_the_largest_is_found(values: Values, steps: list[int]) -> None:
    assert found([Row(0, OUTPUT, values)], OUTPUT.name) == steps


def test_zeros_are_not_lost() -> None:
    assert found([Row(0, GRADIENT, [0.0] * 9 + [1.0]), Row(1, GRADIENT, [0.0] * 9)]) == []


def test_gradients_are_judged_under_the_scale_that_the_scaler_records() -> None:
    small = [2.0**-30] * 4
    rows = [
        Row(0, GRADIENT, small),
        Row(1, SCALE, [1024.0]),
        Row(1, GRADIENT, small),
        Row(2, GRADIENT, small),
        Row(3, SCALE, [2.0]),
        Row(3, GRADIENT, small),
    ]
    assert found(rows) == [0, 3]
    assert found(rows, gradient_scale=64.0) == []
    assert found(rows, gradient_scale=1.0) == [0, 1, 2, 3]


def test_a_scale_is_no_gradients_and_does_not_move_outputs() -> None:
    rows: list[Row] = [Row(0, SCALE, [2.0**20]), Row(0, OUTPUT, [1.0])]
    for info in (SCALE, OUTPUT):
        assert found(rows, info.name) == []


def test_the_message_states_the_share_that_becomes_zero() -> None:
    outcome = all_at_once(
        RuleConfig(rule="number_format_headroom", params={"gradient_scale": 2.0}),
        block_of([Row(0, GRADIENT, [2.0**-30, 1.0])]),
    )
    assert outcome.findings[0].message == (
        "50.0% of the numbers of a.weight:gradient, times 2, would become zero in fp16, 5.0% tolerated"
    )


def test_infos_of_other_roles_are_out_of_scope() -> None:
    info: TensorInfo = tensor("loss", "losses", shape=())
    assert found([Row(0, info, [1e-30])], "loss") == []
