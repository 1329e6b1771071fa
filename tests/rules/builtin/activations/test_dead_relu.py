from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.rules.runs import all_at_once, in_steps, norms, steps_of
from tests.sdk.format.blocks import Row, tensor
from watchstep_rules.config.rule_config import RuleConfig

RELU = tensor("act:output", "activations")
LOSS = tensor("loss", "losses", shape=())


def layer(dead: Sequence[float], *, channels: int = 10, values: int = 32) -> list[Row]:
    """How many of ten channels are dead at each record, over so many values of each."""
    return [
        Row(step, RELU, [0.0] * (channels * values), probes={"channels": channels, "dead_channels": number})
        for step, number in enumerate(dead)
    ]


def losses(values: Sequence[float]) -> list[Row]:
    return [Row(step, LOSS, [value]) for step, value in enumerate(values)]


def found(*rows: list[Row], **params: object) -> list[int]:
    return steps_of(all_at_once(RuleConfig(rule="dead_relu", params=params), in_steps(*rows)), "act:output")


def test_a_layer_that_is_dead_and_stays_so_is_found_and_a_sparse_one_is_not() -> None:
    assert found(layer([3, 10, 9, 10, 10])) == [3, 4]
    assert found(layer([8] * 20)) == []
    assert found(layer([10, 10, 0, 10, 10])) == []


def test_small_batches_must_agree_longer() -> None:
    assert found(layer([10] * 9, values=4)) == [7, 8]
    assert found(layer([10] * 9, values=4), examples=1) == [2, 3, 4, 5, 6, 7, 8]


def test_half_a_layer_is_enough_where_learning_has_died() -> None:
    half, none, stuck = layer([6] * 5), norms("a", [1.0, 0.0, 0.0, 0.0, 0.0]), losses([9.0] * 5)
    assert found(half, none, stuck) == [3, 4]
    assert found(half, norms("a", [1.0] * 5), stuck) == []
    assert found(half, none, norms("b", [1.0] * 5), stuck) == []


def test_a_training_that_has_nothing_left_to_learn_is_fine() -> None:
    none = norms("a", [*[1.0] * 40, *[0.0] * 40])
    assert found(layer([6] * 80), none, losses([1.0, *[0.0] * 79])) == []


def test_a_rectifier_after_the_last_layer_may_be_zero_while_the_model_learns() -> None:
    """As a penalty on values over a bound: it is zero within the bound."""
    weighted = [Row(step, tensor("head:output", "activations", order=1), [1.0, 2.0]) for step in range(80)]
    rectifier = replace(RELU, order=2, module_type="ReLU")
    dead = [replace(row, info=rectifier) for row in layer([10] * 80)]
    learns, stuck = losses([1.0] * 30 + [0.5] * 50), losses([1.0] * 80)
    assert found(dead, weighted, learns) == []
    assert found(dead, weighted, stuck) == list(range(52, 80))
    none = norms("a", [1.0, *[0.0] * 79])
    assert found(dead, weighted, stuck, none)[0] == 3
    hidden = [replace(row, info=replace(rectifier, order=0)) for row in layer([10] * 80)]
    assert found(hidden, weighted, learns) == list(range(2, 80))


@pytest.mark.parametrize(("relu_ns", "steps"), [(5, list(range(2, 60))), (15, [])])
def test_the_last_layer_is_recognized_by_when_it_was_computed(relu_ns: int, steps: list[int]) -> None:
    """A module that is used between layers may be declared after them."""
    head = tensor("head:output", "activations", order=1)
    weighted = [Row(step, head, [1.0, 2.0]) for step in range(60)]
    rectifier = replace(RELU, order=9, module_type="ReLU")
    dead = [replace(row, info=rectifier) for row in layer([10] * 60)]
    block = in_steps(dead, weighted, losses([1.0] * 20 + [0.5] * 40))
    is_relu = block.mask_of_tensors([info.name == "act:output" for info in block.catalogue])
    block = replace(block, time_ns=1000 * block.step + np.where(is_relu, relu_ns, 10))
    assert steps_of(all_at_once(RuleConfig(rule="dead_relu"), block), "act:output") == steps


def test_the_finding_states_how_many_and_since_when() -> None:
    outcome = all_at_once(RuleConfig(rule="dead_relu"), in_steps(layer([9, 10, 10])))
    assert [(finding.value, finding.threshold) for finding in outcome.findings] == [(1.0, 0.9)]
    assert outcome.findings[0].message == (
        "100% of 10 channels of act:output are zero for every example, at least 90% for 3 records in a row"
    )
