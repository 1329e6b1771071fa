"""What is recorded of a model, at which step and under which name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.sdk.training import (
    EVERY_STEP,
    Training,
    batches,
    recorded,
    small_model,
    watched_training,
    watching,
    with_sgd,
)
from watchstep import Cadence, CaptureConfig, Hook, open_run
from watchstep.errors import ConfigError


def test_names_collections_and_steps(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)
    training.run(6)
    run = recorded(hook)
    assert run.steps() == list(range(6))
    assert run.collections == {
        "losses": ["loss"],
        "metrics": [
            "optimizer:beta1/0",
            "optimizer:beta2/0",
            "optimizer:has_state",
            "optimizer:learning_rate/0",
            "optimizer:weight_decay/0",
        ],
        "weights": ["0.weight", "2.weight", "3.weight"],
        "biases": ["0.bias", "2.bias", "3.bias"],
        "gradients": [
            f"{name}:gradient" for name in ("0.bias", "0.weight", "2.bias", "2.weight", "3.bias", "3.weight")
        ],
        "activations": ["0:output", "1:output", "2:output", "3:output"],
        "inputs": ["model:input"],
        "outputs": ["model:output"],
        "updates": [
            f"{name}:update" for name in ("0.bias", "0.weight", "2.bias", "2.weight", "3.bias", "3.weight")
        ],
    }
    info = run.tensor("3.weight:gradient").info
    assert (info.module, info.module_type, info.role, info.shape) == ("3", "Linear", "gradient", (2, 16))


def test_weights_are_those_that_the_step_used(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)
    weight = training.model[0].weight.detach()  # type: ignore[index]
    before = [weight.double().pow(2).sum().item()]
    training.run(3, lambda *_: before.append(weight.double().pow(2).sum().item()))
    sums = recorded(hook).tensor("0.weight").statistics()["square_sum"].to_pylist()
    assert sums == pytest.approx(before[:3], rel=4e-6)


def test_two_backward_calls_are_two_losses(tmp_path: Path) -> None:
    model, optimizer = with_sgd(small_model())
    hook = watching(tmp_path, model, optimizer)
    for x, _ in batches(2):
        out = model(x)
        out.mean().backward(retain_graph=True)
        out.pow(2).mean().backward()
        optimizer.step()
    assert recorded(hook).collections["losses"] == ["loss", "loss_2"]


def test_accumulation_is_one_step(tmp_path: Path) -> None:
    model, optimizer = with_sgd(small_model())
    hook = watching(tmp_path, model, optimizer)
    for place, (x, y) in enumerate(batches(6)):
        nn.functional.cross_entropy(model(x), y).backward()
        if place % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    run = recorded(hook)
    assert run.steps() == [0, 1]
    outputs = run.tensor("3:output").statistics()
    assert outputs["count"].to_pylist() == [3 * 32 * 2] * 2
    assert run.tensor("0.weight:gradient").statistics().num_rows == 2


def test_shared_parameters_have_one_name(tmp_path: Path) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model, optimizer = with_sgd(nn.Sequential(first, second))
    hook = watching(tmp_path, model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert recorded(hook).tensors("weights") == ["0.weight"]


def test_parameters_that_are_added_are_recorded(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)
    training.run(2)
    training.model.add_module("extra", nn.Linear(2, 2))
    training.optimizer.add_param_group({"params": list(training.model.get_submodule("extra").parameters())})
    training.run(2)
    run = recorded(hook)
    assert run.tensor("extra.weight").steps() == [2, 3]
    assert run.tensor("0.weight").steps() == [0, 1, 2, 3]


def test_two_optimizers_record_under_the_steps_of_the_first(tmp_path: Path) -> None:
    first_model, second_model = small_model(0), small_model(1)
    first = torch.optim.SGD(first_model.parameters(), lr=0.1)
    second = torch.optim.SGD(second_model.parameters(), lr=0.1)
    hook = watching(tmp_path, first_model, first)
    hook.watch(nn.ModuleDict({"critic": second_model}), second)
    for x, _ in batches(3):
        first_model(x).sum().backward()
        first.step()
        second_model(x).sum().backward()
        second.step()
    run = recorded(hook)
    assert run.tensor("0.weight:gradient").steps() == [0, 1, 2]
    assert run.tensor("model_2.critic.0.weight:gradient").steps()[-1] <= 3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.DataParallel(nn.Linear(2, 2)), "DistributedDataParallel"),
        (3, r"torch\.nn\.Module"),
        ("model", r"torch\.nn\.Module"),
        (None, r"torch\.nn\.Module"),
    ],
)
def test_what_cannot_be_watched_is_refused(tmp_path: Path, model: Any, message: str) -> None:
    with Hook(tmp_path, config=EVERY_STEP) as hook, pytest.raises(ConfigError, match=message):
        hook.watch(model)


def faulty(training: Training, steps: int, bad_step: int) -> None:
    for step, (x, y) in enumerate(batches(steps)):
        if step == bad_step:
            x[3, 2] = float("nan")
        training.optimizer.zero_grad()
        nn.functional.cross_entropy(training.model(x), y).backward()
        training.optimizer.step()


def test_the_gate_records_a_bad_step_whole_though_nothing_is_due(tmp_path: Path) -> None:
    rarely = Cadence(start=10**6)
    names = ("weights", "biases", "gradients", "activations")
    config = CaptureConfig(collections={**dict.fromkeys(names, rarely), "losses": Cadence()})
    hook, training = watched_training(tmp_path, config=config)
    faulty(training, 40, 25)
    run = recorded(hook)
    gradient = run.tensor("0.weight:gradient").statistics()
    assert gradient["step"].to_pylist() == [25, 26, 27]
    assert gradient["nan"].to_pylist()[0] == 16 * 8
    assert run.tensor("0.weight").statistics()["nan"].to_pylist()[0] == 0
    outputs = run.tensor("1:output").statistics()
    assert (outputs["step"].to_pylist()[0], outputs["nan"].to_pylist()[0]) == (25, 16)


def test_without_the_gate_nothing_is_checked(tmp_path: Path) -> None:
    config = CaptureConfig(collections={"losses": Cadence()}, gate=False)
    hook, training = watched_training(tmp_path, config=config)
    faulty(training, 6, 3)
    assert recorded(hook).tensors() == ["loss"]


def test_an_infinite_gradient_is_found_without_a_bad_loss(tmp_path: Path) -> None:
    config = CaptureConfig(collections={"gradients": Cadence(start=10**6)})
    model, optimizer = with_sgd(small_model(), 0.0)
    hook = watching(tmp_path, model, optimizer, config=config)
    for step, (x, _) in enumerate(batches(5)):
        optimizer.zero_grad()
        model(x).sum().backward()
        if step == 3:
            model.get_parameter("3.bias").grad.fill_(float("inf"))  # type: ignore[union-attr]
        optimizer.step()
    assert recorded(hook).tensor("3.bias:gradient").steps()[0] == 3


@pytest.mark.ci
def test_the_budget_skips_steps_and_reports_its_account(tmp_path: Path) -> None:
    hook, training = Hook(tmp_path, overhead_budget=0.001), Training()
    hook.watch(training.model, training.optimizer)
    training.run(300)
    account = hook.health["overhead"]
    run = recorded(hook)
    assert run.tensor("loss").steps() == list(range(300))
    assert 1 <= len(run.tensor("0.weight:gradient").steps()) < 300
    assert run.tensor("0.weight:gradient").steps()[0] == 0
    assert account["budget"] == 0.001
    assert account["program_seconds"] > 0
    assert account["spent_seconds"] > 0
    assert run.ends()[0].health["overhead"]["every"]["gradients"] > 1


def test_hooks_are_removed_from_the_model_when_closed(tmp_path: Path) -> None:
    model = small_model()
    hook = watching(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    hook.close()
    assert not model._forward_pre_hooks
    assert not any(module._forward_hooks for module in model.modules())


def test_weights_that_the_program_loads_between_steps_are_recorded(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Hook(tmp_path, run="r") as hook:
        hook.watch(model, optimizer)
        model.load_state_dict(before)  # before the first step: a start from a checkpoint
        for step in range(6):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                model.load_state_dict(before)
    assert open_run(hook.run_url).tensor("weights:loaded").steps() == [3]
    assert hook.health["faults"] == {}
    copy.deepcopy(model).load_state_dict(before)
