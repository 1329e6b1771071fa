from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn, optim

from tests.rules.recording import evaluate_training
from tests.rules.trainings.parts import Task
from watchstep import CaptureConfig, Hook, open_run
from watchstep_rules.backtest.backtest import backtest_run
from watchstep_rules.config.defaults import DEFAULT_RULES


def trained(hook: Hook, *, late: bool, frozen: bool = False, average: bool = False) -> None:
    """Train a model whose head is replaced after or before the optimizer is made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
    if not late:
        model[2] = nn.Linear(16, 5)
    optimizer = optim.SGD(model.parameters(), 0.05)
    if late:
        model[2] = nn.Linear(16, 5)
    model[2].requires_grad_(requires_grad=not frozen)
    hook.watch(model, optimizer)
    for x, y in Task(1).batches(steps=101):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if average:
            with torch.no_grad():
                for parameter in model[2].parameters():
                    parameter.mul_(0.999)


def found(folder: Path, *, late: bool, frozen: bool = False, average: bool = False) -> list[tuple[int, str]]:
    findings = evaluate_training(
        lambda hook: trained(hook, late=late, frozen=frozen, average=average),
        "absent_from_optimizer",
        folder,
        config=CaptureConfig(),
    )
    return [(finding.step, finding.tensor) for finding in findings]


def test_a_layer_that_is_made_after_the_optimizer_and_its_twin(tmp_path: Path) -> None:
    assert found(tmp_path / "a", late=True) == [(step, "2.weight:not_in_optimizer") for step in (75, 100)]
    assert found(tmp_path / "b", late=False) == []


def test_what_is_frozen_or_moved_by_hand_is_ignored(tmp_path: Path) -> None:
    assert found(tmp_path / "a", late=True, frozen=True) == []
    assert found(tmp_path / "b", late=True, average=True) == []


Left = Callable[[nn.Sequential], list[nn.Parameter]]


def names(
    folder: Path,
    select: Left,
    *others: Left,
    each: Callable[[int, list[optim.Optimizer]], None] = lambda _step, _optimizers: None,
    **params: object,
) -> set[str]:
    """Train with an optimizer of some parameters, and further optimizers that step as ``each`` defines."""

    def train(hook: Hook) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
        optimizers: list[optim.Optimizer] = [optim.SGD(some(model), 0.05) for some in (select, *others)]
        hook.watch(model, optimizers[0])
        for step, (x, y) in enumerate(Task(1).batches(steps=126)):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizers[0].step()
            each(step, optimizers)

    outcome = evaluate_training(train, "absent_from_optimizer", folder, params, config=CaptureConfig())
    return {finding.tensor.removesuffix(":not_in_optimizer") for finding in outcome}


def part(*places: int) -> Left:
    return lambda model: [parameter for place in places for parameter in model[place].parameters()]


def test_a_head_that_is_trained_alone_is_reported_only_if_requested(tmp_path: Path) -> None:
    assert names(tmp_path / "a", part(4)) == set()
    trunk = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert names(tmp_path / "b", part(4), strict=True) == trunk


def test_layers_between_others_and_biases_beside_weights(tmp_path: Path) -> None:
    assert names(tmp_path / "a", part(0, 4)) == {"2.weight"}
    weights: Left = lambda model: [parameter for parameter in model.parameters() if parameter.dim() > 1]  # noqa: E731
    assert names(tmp_path / "b", weights) == {"0.bias", "2.bias", "4.bias"}


def test_optimizers_that_alternate_have_their_own_parameters(tmp_path: Path) -> None:
    def by_turns(step: int, optimizers: list[optim.Optimizer]) -> None:
        if step == 110:
            optimizers[1].step()

    assert names(tmp_path / "seldom", part(0, 4), part(2), each=by_turns) == set()
    assert names(tmp_path / "never yet", part(0, 4), part(2)) == set()


def test_what_is_taken_out_of_a_group_in_mid_run(tmp_path: Path) -> None:
    def once(step: int, optimizers: list[optim.Optimizer]) -> None:
        if step == 40:
            group = optimizers[0].param_groups[0]
            group["params"] = group["params"][-2:]

    everything = part(0, 2, 4)
    assert names(tmp_path, everything, each=once) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_an_optimizer_of_another_model_in_the_place_of_the_first(tmp_path: Path) -> None:
    def train(hook: Hook) -> None:
        torch.manual_seed(0)
        model, other = (nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 5)) for _ in range(2))
        optimizer = optim.SGD(model.parameters(), 0.05)
        hook.watch(model, optimizer)
        for step, (x, y) in enumerate(Task(1).batches(steps=151)):
            if step == 30:
                optimizer = optim.SGD(other.parameters(), 0.05)
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            hook.step()

    outcome = evaluate_training(train, "absent_from_optimizer", tmp_path, config=CaptureConfig())
    assert {finding.tensor for finding in outcome} >= {
        "0.weight:not_in_optimizer",
        "2.weight:not_in_optimizer",
    }
    assert outcome[0].step == 125


def test_one_fault_is_one_report(tmp_path: Path) -> None:
    with Hook(tmp_path, run="run", config=CaptureConfig()) as hook:
        trained(hook, late=True)
    backtest = backtest_run(open_run(hook.run_url), DEFAULT_RULES)
    messages = [
        (outcome.config.rule, change.step)
        for outcome in backtest.attempts[0].outcomes
        for change in outcome.fired
        if change.finding and change.finding.role == "not_in_optimizer" and not change.inhibited_by
    ]
    assert messages == [("weight_not_updating", 50)]
