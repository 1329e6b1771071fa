from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from tests.rules.recording import evaluate_training
from tests.rules.trainings.parts import Task
from watchstep import CaptureConfig, Hook
from watchstep_rules.config.defaults import DEFAULT_RULES

STEPS = 160
Each = Callable[[int, nn.Sequential], None]


def nothing(step: int, model: nn.Sequential) -> None:
    """As it should be."""


def never_in_training(step: int, model: nn.Sequential) -> None:
    model.eval()


def trained(hook: Hook, each: Each, make: Callable[[nn.Sequential], None] = lambda _: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    make(model)
    optimizer = optim.SGD(model.parameters(), 0.05)
    hook.watch(model, optimizer)
    for step, (x, y) in enumerate(Task(1).batches(steps=STEPS)):
        each(step, model)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def found(
    folder: Path, each: Each = nothing, make: Callable[[nn.Sequential], None] = lambda _: None
) -> dict[int, str]:
    findings = evaluate_training(
        lambda hook: trained(hook, each, make), "frozen_batch_norm", folder, config=CaptureConfig()
    )
    return {finding.step: finding.message for finding in findings}


def messages_by_step(
    folder: Path, each: Each, make: Callable[[nn.Sequential], None] = lambda _: None
) -> dict[int, str]:
    findings = evaluate_training(
        lambda hook: trained(hook, each, make), "running_statistics_frozen", folder, config=CaptureConfig()
    )
    return {finding.step: finding.message for finding in findings}


def test_a_model_that_is_never_in_training_mode(tmp_path: Path) -> None:
    findings = found(tmp_path, never_in_training)
    assert min(findings) == 25
    assert findings[25] == (
        "1 learns while the whole model is in evaluation mode, and 1.running_var is 1 everywhere, its initial value, at 2 records in a row"
    )


def test_train_that_is_forgotten_after_an_evaluation(tmp_path: Path) -> None:
    def forgets(step: int, model: nn.Sequential) -> None:
        model.train(step < 60)

    findings = found(tmp_path, forgets)
    assert min(findings) == 100
    assert "1 learns while the whole model is in evaluation mode" in findings[100]


def test_a_momentum_of_zero(tmp_path: Path) -> None:
    def make(model: nn.Sequential) -> None:
        model[1] = nn.BatchNorm1d(16, momentum=0.0)

    findings = found(tmp_path, make=make)
    assert min(findings) == 50
    assert "1 has processed 51 batches, and 1.running_var is 1 everywhere" in findings[50]


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
        (nothing, lambda _: None),
        (evaluates_now_and_then, lambda _: None),
        (frozen_layer, lambda _: None),
        (frozen_from_the_start, lambda _: None),
        (frozen_from_the_start, frozen),
        (frozen_from_the_start, pretrained),
        (never_in_training, frozen),
        (never_in_training, pretrained),
    ],
)
def test_what_is_as_it_should_be_or_frozen_on_purpose(
    each: Each, make: Callable[[nn.Sequential], None], tmp_path: Path
) -> None:
    assert found(tmp_path, each, make) == {}


@pytest.mark.parametrize(
    ("each", "make", "first"),
    [
        (frozen_from_the_start, pretrained, 25),
        (frozen_from_the_start, frozen, 25),
        (never_in_training, pretrained, 25),
        (frozen_layer, lambda _: None, 100),
    ],
)
def test_a_layer_in_evaluation_mode_on_purpose_is_reported_without_a_warning(
    each: Each, make: Callable[[nn.Sequential], None], first: int, tmp_path: Path
) -> None:
    messages = messages_by_step(tmp_path, each, make)
    assert min(messages) == first
    assert messages[first] == (
        "1 is in evaluation mode, at 2 records in a row: its running statistics (1.running_var) are frozen; "
        "correct if deliberate, e.g. fine-tuning"
    )
    assert {config.rule: config.severity for config in DEFAULT_RULES}["running_statistics_frozen"] == "info"


@pytest.mark.parametrize("each", [nothing, evaluates_now_and_then])
def test_a_layer_that_trains_is_not_reported(each: Each, tmp_path: Path) -> None:
    assert messages_by_step(tmp_path, each) == {}


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
