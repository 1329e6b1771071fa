"""Rules over outputs of activation functions and over running statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn, optim

from tests.rules.recording import evaluate_training, fit
from tests.rules.runs import all_at_once, first_message, in_steps, norms, steps_of
from tests.rules.trainings.parts import Task
from tests.sdk.format.blocks import Row, tensor
from watchstep import CaptureConfig, Hook
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig

# dead_relu


RELU = tensor("act:output", "activations")
LOSS = tensor("loss", "losses", shape=())


def rectifier_layer(dead: Sequence[float], *, channels: int = 10, values: int = 32) -> list[Row]:
    """How many of ten channels are dead at each record, over so many values of each."""
    return [
        Row(step, RELU, [0.0] * (channels * values), probes={"channels": channels, "dead_channels": number})
        for step, number in enumerate(dead)
    ]


def losses(values: Sequence[float]) -> list[Row]:
    return [Row(step, LOSS, [value]) for step, value in enumerate(values)]


def dead_steps(*rows: list[Row], **params: object) -> list[int]:
    return steps_of(all_at_once(RuleConfig(rule="dead_relu", params=params), in_steps(*rows)), "act:output")


def test_a_layer_that_is_dead_and_stays_so_is_found_and_a_sparse_one_is_not() -> None:
    assert dead_steps(rectifier_layer([3, 10, 9, 10, 10])) == [3, 4]
    assert dead_steps(rectifier_layer([8] * 20)) == []
    assert dead_steps(rectifier_layer([10, 10, 0, 10, 10])) == []


def test_small_batches_must_agree_longer() -> None:
    assert dead_steps(rectifier_layer([10] * 9, values=4)) == [7, 8]
    assert dead_steps(rectifier_layer([10] * 9, values=4), examples=1) == [2, 3, 4, 5, 6, 7, 8]


def test_half_a_layer_is_enough_where_learning_has_died() -> None:
    half, none, stuck = rectifier_layer([6] * 5), norms("a", [1.0, 0.0, 0.0, 0.0, 0.0]), losses([9.0] * 5)
    assert dead_steps(half, none, stuck) == [3, 4]
    assert dead_steps(half, norms("a", [1.0] * 5), stuck) == []
    assert dead_steps(half, none, norms("b", [1.0] * 5), stuck) == []


def test_a_training_that_has_nothing_left_to_learn_is_fine() -> None:
    none = norms("a", [*[1.0] * 40, *[0.0] * 40])
    assert dead_steps(rectifier_layer([6] * 80), none, losses([1.0, *[0.0] * 79])) == []


def test_a_rectifier_after_the_last_layer_may_be_zero_while_the_model_learns() -> None:
    """As a penalty on values over a bound: it is zero within the bound."""
    weighted = [Row(step, tensor("head:output", "activations", order=1), [1.0, 2.0]) for step in range(80)]
    rectifier = replace(RELU, order=2, module_type="ReLU")
    dead = [replace(row, info=rectifier) for row in rectifier_layer([10] * 80)]
    learns, stuck = losses([1.0] * 30 + [0.5] * 50), losses([1.0] * 80)
    assert dead_steps(dead, weighted, learns) == []
    assert dead_steps(dead, weighted, stuck) == list(range(52, 80))
    none = norms("a", [1.0, *[0.0] * 79])
    assert dead_steps(dead, weighted, stuck, none)[0] == 3
    hidden = [replace(row, info=replace(rectifier, order=0)) for row in rectifier_layer([10] * 80)]
    assert dead_steps(hidden, weighted, learns) == list(range(2, 80))


@pytest.mark.parametrize(("relu_ns", "steps"), [(5, list(range(2, 60))), (15, [])])
def test_the_last_layer_is_recognized_by_when_it_was_computed(relu_ns: int, steps: list[int]) -> None:
    """A module that is used between layers may be declared after them."""
    head = tensor("head:output", "activations", order=1)
    weighted = [Row(step, head, [1.0, 2.0]) for step in range(60)]
    rectifier = replace(RELU, order=9, module_type="ReLU")
    dead = [replace(row, info=rectifier) for row in rectifier_layer([10] * 60)]
    block = in_steps(dead, weighted, losses([1.0] * 20 + [0.5] * 40))
    is_relu = block.mask_of_tensors([info.name == "act:output" for info in block.catalogue])
    block = replace(block, time_ns=1000 * block.step + np.where(is_relu, relu_ns, 10))
    assert steps_of(all_at_once(RuleConfig(rule="dead_relu"), block), "act:output") == steps


def test_the_finding_states_how_many_and_since_when() -> None:
    outcome = all_at_once(RuleConfig(rule="dead_relu"), in_steps(rectifier_layer([9, 10, 10])))
    assert [(finding.value, finding.threshold) for finding in outcome.findings] == [(1.0, 0.9)]
    assert outcome.findings[0].message == (
        "100% of 10 channels of act:output are zero for every example, at least 90% for 3 records in a row"
    )


# saturated_activation


HEAD = [Row(step, tensor("head:output", "activations", order=9), [1.0]) for step in range(60)]


def bounded_layer(
    outputs: Sequence[Sequence[float]], kind: str = "Tanh", *, at_bounds: float = 0.0, order: int = 1
) -> list[Row]:
    """Outputs of ten channels, repeated to forty values of each."""
    info = replace(tensor("act:output", "activations", order=order), module_type=kind)
    probes = {"channels": 10.0, "saturated_channels": at_bounds}
    return [
        Row(step, info, list(values) * (400 // len(values)), probes=probes)
        for step, values in enumerate(outputs)
    ]


def saturated_steps(*rows: list[Row], **params: object) -> list[int]:
    config = RuleConfig(rule="saturated_activation", params=params)
    return steps_of(all_at_once(config, in_steps(*rows)), "act:output")


@pytest.mark.parametrize(
    ("kind", "flat", "steep"), [("Tanh", [-0.99, 0.98], [-0.6, 0.7]), ("Sigmoid", [0.01, 0.99], [0.3, 0.8])]
)
def test_a_hidden_layer_at_its_bounds_is_found_and_a_steep_one_is_not(
    kind: str, flat: list[float], steep: list[float]
) -> None:
    assert saturated_steps(bounded_layer([steep, flat, flat, flat, flat], kind), HEAD) == [3, 4]
    assert saturated_steps(bounded_layer([steep] * 9, kind), HEAD) == []
    assert saturated_steps(bounded_layer([flat, flat, steep, flat, flat], kind), HEAD) == []


def test_channels_at_a_bound_for_every_example_are_found() -> None:
    assert saturated_steps(bounded_layer([[0.5]] * 4, "Hardtanh", at_bounds=5.0), HEAD) == [2, 3]
    assert saturated_steps(bounded_layer([[0.5]] * 4, "Hardtanh", at_bounds=4.0), HEAD) == []


def test_the_output_of_a_classifier_may_be_sure() -> None:
    sure = bounded_layer([[0.5]] * 20 + [[0.999]] * 9, "Sigmoid", order=10)
    assert saturated_steps(sure, HEAD) == []
    assert saturated_steps(sure, HEAD, [Row(step, LOSS, [0.95**step]) for step in range(29)]) == []


@pytest.mark.parametrize(("output_ns", "is_found"), [(5, True), (15, False)])
def test_an_output_is_recognized_by_when_it_was_computed(output_ns: int, is_found: bool) -> None:
    """A module that is used last may be declared first."""
    sure = bounded_layer([[0.5]] * 20 + [[0.999]] * 9, "Sigmoid", order=1)
    block = in_steps(sure, HEAD[:29])
    is_output = block.mask_of_tensors([info.name == "act:output" for info in block.catalogue])
    block = replace(block, time_ns=1000 * block.step + np.where(is_output, output_ns, 10))
    steps = steps_of(all_at_once(RuleConfig(rule="saturated_activation"), block), "act:output")
    assert bool(steps) == is_found


def test_an_output_that_cannot_reach_its_targets_is_found() -> None:
    bounded = bounded_layer([[0.999]] * 5, "Sigmoid", order=10)
    assert saturated_steps(bounded, HEAD, [Row(step, LOSS, [54.0 - step]) for step in range(5)]) == [2, 3, 4]


def test_units_that_are_switches_at_convergence_are_fine() -> None:
    falling = [Row(step, LOSS, [1.0 if step < 5 else 0.01]) for step in range(60)]
    outputs = [[0.5, -0.5]] * 40 + [[-0.99, 0.99]] * 20
    assert saturated_steps(bounded_layer(outputs), HEAD, falling) == []
    assert (
        saturated_steps(bounded_layer(outputs), HEAD, [Row(step, LOSS, [1.0]) for step in range(60)])[0] == 42
    )


def test_a_loss_that_falls_by_much_at_each_step_has_converged_though_its_mean_lags() -> None:
    falling = [Row(step, LOSS, [max(0.4**step, 1e-7)]) for step in range(12)]
    assert saturated_steps(bounded_layer([[0.5, -0.5]] * 6 + [[-0.99, 0.99]] * 6), HEAD, falling) == []
    lucky = [Row(step, LOSS, [0.0 if step in (8, 10) else 1.0]) for step in range(12)]
    assert saturated_steps(bounded_layer([[0.5, -0.5]] * 6 + [[-0.99, 0.99]] * 6), HEAD, lucky) == [
        8,
        9,
        10,
        11,
    ]


def test_a_layer_that_saturates_while_the_loss_halves_is_fine() -> None:
    halves = [Row(step, LOSS, [3e4 if step < 20 else 1e4]) for step in range(60)]
    assert saturated_steps(bounded_layer([[0.5, -0.5]] * 40 + [[-0.99, 0.99]] * 20), HEAD, halves) == []


def test_a_layer_that_becomes_flat_while_a_loss_falls_that_cannot_halve_is_fine() -> None:
    """As codes that are made binary step by step, with smoothed labels."""
    falls = [Row(step, LOSS, [2.3 if step < 10 else 1.5]) for step in range(60)]
    flat = [[-0.99, 0.99]] * 20
    assert saturated_steps(bounded_layer([[0.5, -0.5]] * 40 + flat), HEAD, falls) == []
    assert saturated_steps(bounded_layer([[-0.99, 0.99]] + [[0.5, -0.5]] * 39 + flat), HEAD, falls)[-1] == 59
    stays = [Row(step, LOSS, [2.3 if step < 10 else 1.9]) for step in range(60)]
    assert saturated_steps(bounded_layer([[0.5, -0.5]] * 40 + flat), HEAD, stays)[-1] == 59


@pytest.mark.parametrize(("part", "is_found"), [("kl_loss", True), ("policy_loss", False)])
def test_a_critic_that_becomes_flat_as_returns_grow_is_fine(part: str, is_found: bool) -> None:
    rises = [Row(step, LOSS, [1.0 + step]) for step in range(60)]
    beside = [Row(step, tensor(part, "losses", shape=()), [0.1]) for step in range(60)]
    outputs = [[0.5, -0.5]] * 40 + [[-0.99, 0.99]] * 20
    assert bool(saturated_steps(bounded_layer(outputs), HEAD, rises, beside)) == is_found
    assert saturated_steps(bounded_layer([[-0.99, 0.99]] * 60), HEAD, rises, beside)[-1] == 59


def test_the_finding_of_a_saturated_layer_states_the_slope() -> None:
    assert first_message("saturated_activation", in_steps(bounded_layer([[0.99, -0.99]] * 3), HEAD)) == (
        "act:output has 0.02 of its greatest slope, below 0.1 for 3 records in a row"
    )


def test_what_was_found_lasts_until_the_layer_is_steep_again_however_low_the_loss_falls() -> None:
    falling = [Row(step, LOSS, [1.0 if step < 10 else 0.01]) for step in range(60)]
    at_its_bounds = [[-0.99, 0.985]] * 50 + [[0.5, -0.5]] * 10
    assert saturated_steps(bounded_layer(at_its_bounds), HEAD, falling) == list(range(2, 50))


def test_gates_that_begin_closed_are_ignored_until_they_shut() -> None:
    closed, shut = [0.004, 0.009], [0.00002, 0.0005]
    assert saturated_steps(bounded_layer([closed] * 9, "Sigmoid", at_bounds=10.0), HEAD) == []
    assert saturated_steps(bounded_layer([[0.996, 0.991]] * 9, "Sigmoid", at_bounds=10.0), HEAD) == []
    assert saturated_steps(bounded_layer([[0.996, 0.005]] * 9, "Sigmoid", at_bounds=10.0), HEAD) == []
    assert saturated_steps(bounded_layer([closed] * 5 + [shut] * 4, "Sigmoid", at_bounds=10.0), HEAD) == [
        7,
        8,
    ]


def test_sigmoids_that_weights_saturate_are_no_gates() -> None:
    beyond = [0.0, 0.006, 0.007, 0.008]
    assert saturated_steps(bounded_layer([beyond] * 4, "Sigmoid", at_bounds=10.0), HEAD) == [2, 3]
    assert saturated_steps(
        bounded_layer([[0.006], [0.007], [0.006], [0.007]], "Tanh", at_bounds=10.0), HEAD
    ) == [
        2,
        3,
    ]
    later = [[0.5]] + [[0.004, 0.009]] * 4
    assert saturated_steps(bounded_layer(later, "Sigmoid"), HEAD) == [3, 4]


def test_the_output_of_a_model_is_no_gate() -> None:
    assert saturated_steps(bounded_layer([[0.004]] * 4, "Sigmoid", order=10), HEAD) == []
    losses = [Row(step, LOSS, [1.0]) for step in range(4)]
    assert saturated_steps(bounded_layer([[0.004]] * 4, "Sigmoid", order=10), HEAD, losses) == [2, 3]


# frozen_batch_norm and running_statistics_frozen


STEPS = 160
Each = Callable[[int, nn.Sequential], None]
Make = Callable[[nn.Sequential], None]


def unchanged(_: nn.Sequential) -> None:
    """As it is made."""


def nothing(step: int, model: nn.Sequential) -> None:
    """As it should be."""


def never_in_training(step: int, model: nn.Sequential) -> None:
    model.eval()


def trained(hook: Hook, each: Each, make: Make = unchanged) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    make(model)
    optimizer = optim.SGD(model.parameters(), 0.05)
    batches = Task(1).batches(steps=STEPS)
    fit(hook, model, optimizer, batches, before=lambda step: each(step, model))


def messages(
    folder: Path, each: Each = nothing, make: Make = unchanged, rule: str = "frozen_batch_norm"
) -> dict[int, str]:
    """What a rule reports of a training, by step."""
    findings = evaluate_training(lambda hook: trained(hook, each, make), rule, folder, config=CaptureConfig())
    return {finding.step: finding.message for finding in findings}


def in_evaluation_mode_from_step_60(step: int, model: nn.Sequential) -> None:
    model.train(step < 60)


def momentum_of_zero(model: nn.Sequential) -> None:
    model[1] = nn.BatchNorm1d(16, momentum=0.0)


@pytest.mark.parametrize(
    ("each", "make", "first", "words"),
    [
        (
            never_in_training,
            unchanged,
            25,
            "1 learns while the whole model is in evaluation mode, and 1.running_var is 1 everywhere, its initial value, at 2 records in a row",
        ),
        (
            in_evaluation_mode_from_step_60,
            unchanged,
            100,
            "1 learns while the whole model is in evaluation mode",
        ),
        (nothing, momentum_of_zero, 50, "1 has processed 51 batches, and 1.running_var is 1 everywhere"),
    ],
)
def test_statistics_that_do_not_follow_the_weights_are_found(
    each: Each, make: Make, first: int, words: str, tmp_path: Path
) -> None:
    findings = messages(tmp_path, each, make)
    assert min(findings) == first
    assert findings[first].startswith(words)


def evaluates_now_and_then(step: int, model: nn.Sequential) -> None:
    if step % 5 == 0:
        model.eval()
        model(torch.randn(8, 20))
    model.train()


def frozen_layer(step: int, model: nn.Sequential) -> None:
    """Its statistics alone, late, as some do for the last epochs."""
    model.train()
    model[1].train(step < 60)


def frozen_from_the_start(step: int, model: nn.Sequential) -> None:
    model.train()
    model[1].eval()


def frozen(model: nn.Sequential) -> None:
    """Its statistics and its scale."""
    model[1].requires_grad_(requires_grad=False)


def pretrained(model: nn.Sequential) -> None:
    with torch.no_grad():
        for _ in range(3):
            model[:2](torch.randn(64, 20))


@pytest.mark.parametrize(
    ("each", "make"),
    [
        (nothing, unchanged),
        (evaluates_now_and_then, unchanged),
        (frozen_layer, unchanged),
        (frozen_from_the_start, unchanged),
        (frozen_from_the_start, frozen),
        (frozen_from_the_start, pretrained),
        (never_in_training, frozen),
        (never_in_training, pretrained),
    ],
)
def test_what_is_as_it_should_be_or_frozen_on_purpose(each: Each, make: Make, tmp_path: Path) -> None:
    assert messages(tmp_path, each, make) == {}


@pytest.mark.parametrize(
    ("each", "make", "first"),
    [
        (frozen_from_the_start, pretrained, 25),
        (frozen_from_the_start, frozen, 25),
        (never_in_training, pretrained, 25),
        (frozen_layer, unchanged, 100),
    ],
)
def test_a_layer_in_evaluation_mode_on_purpose_is_reported_without_a_warning(
    each: Each, make: Make, first: int, tmp_path: Path
) -> None:
    reported = messages(tmp_path, each, make, "running_statistics_frozen")
    assert min(reported) == first
    assert reported[first] == (
        "1 is in evaluation mode, at 2 records in a row: its running statistics (1.running_var) are frozen; "
        "correct if deliberate, e.g. fine-tuning"
    )
    assert {config.rule: config.severity for config in DEFAULT_RULES}["running_statistics_frozen"] == "info"


@pytest.mark.parametrize("each", [nothing, evaluates_now_and_then])
def test_a_layer_that_trains_is_not_reported(each: Each, tmp_path: Path) -> None:
    assert messages(tmp_path, each, rule="running_statistics_frozen") == {}


@pytest.mark.ci
@pytest.mark.parametrize("affine", ["learns", "frozen", "none"])
def test_a_layer_in_evaluation_mode_whose_input_becomes_another(affine: str, tmp_path: Path) -> None:
    def train(hook: Hook, times: float) -> None:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16, affine=affine != "none")
        model = nn.Sequential(nn.Linear(20, 16), norm, nn.ReLU(), nn.Linear(16, 5))
        with torch.no_grad():
            for _ in range(40):
                model[:2](torch.randn(64, 20))
        norm.requires_grad_(requires_grad=affine == "learns").eval()
        optimizer = optim.SGD(
            [parameter for parameter in model.parameters() if parameter.requires_grad], 1e-7
        )
        hook.watch(model, optimizer)
        for step in range(STEPS):
            x = torch.randn(32, 20) * (times if step >= 60 else 1.0)
            model.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    def judged(times: float) -> dict[int, str]:
        findings = evaluate_training(
            lambda hook: train(hook, times), "frozen_batch_norm", tmp_path / str(times)
        )
        return {finding.step: finding.message for finding in findings}

    earlier = judged(100.0)
    assert (min(earlier), max(earlier)) == (61, 150)
    assert "the output of 1, which is in evaluation mode, has " in earlier[61]
    assert judged(4.0) == {}
