from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.rules.runs import all_at_once, in_steps, steps_of
from tests.sdk.format.blocks import Row, tensor
from watchstep_rules.config.rule_config import RuleConfig

LOSS = tensor("loss", "losses", shape=())
HEAD = [Row(step, tensor("head:output", "activations", order=9), [1.0]) for step in range(60)]


def layer(
    outputs: Sequence[Sequence[float]], kind: str = "Tanh", *, at_bounds: float = 0.0, order: int = 1
) -> list[Row]:
    """Outputs of ten channels, repeated to forty values of each."""
    info = replace(tensor("act:output", "activations", order=order), module_type=kind)
    probes = {"channels": 10.0, "saturated_channels": at_bounds}
    return [
        Row(step, info, list(values) * (400 // len(values)), probes=probes)
        for step, values in enumerate(outputs)
    ]


def found(*rows: list[Row], **params: object) -> list[int]:
    config = RuleConfig(rule="saturated_activation", params=params)
    return steps_of(all_at_once(config, in_steps(*rows)), "act:output")


@pytest.mark.parametrize(
    ("kind", "flat", "steep"), [("Tanh", [-0.99, 0.98], [-0.6, 0.7]), ("Sigmoid", [0.01, 0.99], [0.3, 0.8])]
)
def test_a_hidden_layer_at_its_bounds_is_found_and_a_steep_one_is_not(
    kind: str, flat: list[float], steep: list[float]
) -> None:
    assert found(layer([steep, flat, flat, flat, flat], kind), HEAD) == [3, 4]
    assert found(layer([steep] * 9, kind), HEAD) == []
    assert found(layer([flat, flat, steep, flat, flat], kind), HEAD) == []


def test_channels_at_a_bound_for_every_example_are_found() -> None:
    assert found(layer([[0.5]] * 4, "Hardtanh", at_bounds=5.0), HEAD) == [2, 3]
    assert found(layer([[0.5]] * 4, "Hardtanh", at_bounds=4.0), HEAD) == []


def test_the_output_of_a_classifier_may_be_sure() -> None:
    sure = layer([[0.5]] * 20 + [[0.999]] * 9, "Sigmoid", order=10)
    assert found(sure, HEAD) == []
    assert found(sure, HEAD, [Row(step, LOSS, [0.95**step]) for step in range(29)]) == []


@pytest.mark.parametrize(("output_ns", "is_found"), [(5, True), (15, False)])
def test_the_last_layer_is_recognized_by_when_it_was_computed(output_ns: int, is_found: bool) -> None:
    """A module that is used last may be declared first."""
    sure = layer([[0.5]] * 20 + [[0.999]] * 9, "Sigmoid", order=1)
    block = in_steps(sure, HEAD[:29])
    is_output = block.mask_of_tensors([info.name == "act:output" for info in block.catalogue])
    block = replace(block, time_ns=1000 * block.step + np.where(is_output, output_ns, 10))
    steps = steps_of(all_at_once(RuleConfig(rule="saturated_activation"), block), "act:output")
    assert bool(steps) == is_found


def test_an_output_that_cannot_reach_its_targets_is_found() -> None:
    bounded = layer([[0.999]] * 5, "Sigmoid", order=10)
    assert found(bounded, HEAD, [Row(step, LOSS, [54.0 - step]) for step in range(5)]) == [2, 3, 4]


def test_units_that_are_switches_at_convergence_are_fine() -> None:
    falling = [Row(step, LOSS, [1.0 if step < 5 else 0.01]) for step in range(60)]
    outputs = [[0.5, -0.5]] * 40 + [[-0.99, 0.99]] * 20
    assert found(layer(outputs), HEAD, falling) == []
    assert found(layer(outputs), HEAD, [Row(step, LOSS, [1.0]) for step in range(60)])[0] == 42


def test_a_loss_that_falls_by_much_at_each_step_has_converged_though_its_mean_lags() -> None:
    falling = [Row(step, LOSS, [max(0.4**step, 1e-7)]) for step in range(12)]
    assert found(layer([[0.5, -0.5]] * 6 + [[-0.99, 0.99]] * 6), HEAD, falling) == []
    lucky = [Row(step, LOSS, [0.0 if step in (8, 10) else 1.0]) for step in range(12)]
    assert found(layer([[0.5, -0.5]] * 6 + [[-0.99, 0.99]] * 6), HEAD, lucky) == [8, 9, 10, 11]


def test_a_layer_that_saturates_while_the_loss_halves_is_fine() -> None:
    halves = [Row(step, LOSS, [3e4 if step < 20 else 1e4]) for step in range(60)]
    assert found(layer([[0.5, -0.5]] * 40 + [[-0.99, 0.99]] * 20), HEAD, halves) == []


def test_a_layer_that_becomes_flat_while_a_loss_falls_that_cannot_halve_is_fine() -> None:
    """As codes that are made binary step by step, with smoothed labels."""
    falls = [Row(step, LOSS, [2.3 if step < 10 else 1.5]) for step in range(60)]
    flat = [[-0.99, 0.99]] * 20
    assert found(layer([[0.5, -0.5]] * 40 + flat), HEAD, falls) == []
    assert found(layer([[-0.99, 0.99]] + [[0.5, -0.5]] * 39 + flat), HEAD, falls)[-1] == 59
    stays = [Row(step, LOSS, [2.3 if step < 10 else 1.9]) for step in range(60)]
    assert found(layer([[0.5, -0.5]] * 40 + flat), HEAD, stays)[-1] == 59


@pytest.mark.parametrize(("part", "is_found"), [("kl_loss", True), ("policy_loss", False)])
def test_a_critic_that_becomes_flat_as_returns_grow_is_fine(part: str, is_found: bool) -> None:
    rises = [Row(step, LOSS, [1.0 + step]) for step in range(60)]
    beside = [Row(step, tensor(part, "losses", shape=()), [0.1]) for step in range(60)]
    outputs = [[0.5, -0.5]] * 40 + [[-0.99, 0.99]] * 20
    assert bool(found(layer(outputs), HEAD, rises, beside)) == is_found
    assert found(layer([[-0.99, 0.99]] * 60), HEAD, rises, beside)[-1] == 59


def test_the_finding_states_the_slope() -> None:
    outcome = all_at_once(RuleConfig(rule="saturated_activation"), in_steps(layer([[0.99, -0.99]] * 3), HEAD))
    assert outcome.findings[0].message == (
        "act:output has 0.02 of its greatest slope, below 0.1 for 3 records in a row"
    )


def test_what_was_found_lasts_until_the_layer_is_steep_again_however_low_the_loss_falls() -> None:
    falling = [Row(step, LOSS, [1.0 if step < 10 else 0.01]) for step in range(60)]
    at_its_bounds = [[-0.99, 0.985]] * 50 + [[0.5, -0.5]] * 10
    assert found(layer(at_its_bounds), HEAD, falling) == list(range(2, 50))


def test_gates_that_begin_closed_are_ignored_until_they_shut() -> None:
    closed, shut = [0.004, 0.009], [0.00002, 0.0005]
    assert found(layer([closed] * 9, "Sigmoid", at_bounds=10.0), HEAD) == []
    assert found(layer([[0.996, 0.991]] * 9, "Sigmoid", at_bounds=10.0), HEAD) == []
    assert found(layer([[0.996, 0.005]] * 9, "Sigmoid", at_bounds=10.0), HEAD) == []
    assert found(layer([closed] * 5 + [shut] * 4, "Sigmoid", at_bounds=10.0), HEAD) == [7, 8]


def test_sigmoids_that_weights_saturate_are_no_gates() -> None:
    beyond = [0.0, 0.006, 0.007, 0.008]
    assert found(layer([beyond] * 4, "Sigmoid", at_bounds=10.0), HEAD) == [2, 3]
    assert found(layer([[0.006], [0.007], [0.006], [0.007]], "Tanh", at_bounds=10.0), HEAD) == [2, 3]
    later = [[0.5]] + [[0.004, 0.009]] * 4
    assert found(layer(later, "Sigmoid"), HEAD) == [3, 4]


def test_the_output_of_a_model_is_no_gate() -> None:
    assert found(layer([[0.004]] * 4, "Sigmoid", order=10), HEAD) == []
    losses = [Row(step, LOSS, [1.0]) for step in range(4)]
    assert found(layer([[0.004]] * 4, "Sigmoid", order=10), HEAD, losses) == [2, 3]
