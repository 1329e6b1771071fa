from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.rules.builtin.losses.losses import Curve, falling, noisy
from tests.rules.recording import EVERYTHING, evaluate_training
from tests.rules.runs import all_at_once, in_steps
from tests.rules.trainings.parts import Task
from tests.sdk.format.blocks import Row, tensor
from watchstep import Hook
from watchstep_rules.config.rule_config import RuleConfig

LOSS = tensor("loss", "losses", shape=())
RATE = tensor("optimizer:learning_rate/0", "metrics", shape=())
SOUND = noisy(falling(2.0, 0.4, 300, 30.0), 0.05)


def found(losses: Curve, rates: dict[int, float], **params: object) -> list[int]:
    rows = [Row(step, LOSS, [float(value)]) for step, value in enumerate(losses)]
    changes = [Row(step, RATE, [value]) for step, value in rates.items()]
    outcome = all_at_once(RuleConfig(rule="hyperparameter_jump", params=params), in_steps(rows, changes))
    return [finding.step for finding in outcome.findings]


def hurt(since: int, height: float = 1.0) -> Curve:
    curve: Curve = SOUND.copy()
    curve[since:] += height
    return curve


def test_a_jump_that_harms_and_its_twins() -> None:
    assert found(hurt(101), {0: 1e-3, 100: 0.1})[0] == 108
    assert found(SOUND, {0: 1e-3, 100: 0.1}) == []
    assert found(hurt(101), {0: 1e-3, 100: 5e-3}) == []
    assert found(hurt(101), {0: 0.1, 50: 1e-3, 100: 0.1}) == [], "it was as high before"
    assert found(hurt(101), {0: 1e-5, 5: 1e-3}) == [], "a warm-up of stages"
    assert found(hurt(101), {0: 0.0, 100: 1e-3}) == [], "zero has no multiple"
    assert found(hurt(250), {0: 1e-3, 100: 0.1}, patience=100) == []


def test_a_rate_that_grows_by_a_tenth_at_each_step() -> None:
    rates = {0: 1e-3} | {step: 1e-3 * 1.1 ** (step - 149) for step in range(150, 200)}
    assert found(hurt(180), rates)[0] == 187
    assert found(SOUND, rates) == []
    linear = {step: 1e-5 * (step + 1) for step in range(250)}
    assert found(hurt(180), linear) == [], "a warm-up"


def test_a_loss_that_is_no_number_has_suffered() -> None:
    losses = SOUND.copy()
    losses[101:] = np.nan
    assert found(losses, {0: 1e-3, 100: 0.1})[0] == 108


def test_the_message_names_value_step_and_harm() -> None:
    rows = [Row(step, LOSS, [1.0 if step <= 50 else 3.0]) for step in range(60)]
    changes = [Row(0, RATE, [1e-3]), Row(50, RATE, [0.1])]
    outcome = all_at_once(RuleConfig(rule="hyperparameter_jump"), in_steps(rows, changes))
    assert outcome.findings[0].message == (
        "optimizer:learning_rate/0 went to 0.1 at step 50, 100 times its largest before; loss is 3, 8 of the last 10 are above "
        "1.2, and it was 1 before"
    )


Schedule = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def trained(
    hook: Hook, optimizer: str, schedule: Schedule | None = None, jump: str = "", step: int = 100
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    chosen: torch.optim.Optimizer
    if optimizer == "SGD":
        chosen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    else:
        chosen = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    scheduler = None if schedule is None else schedule(chosen)
    hook.watch(model, chosen)
    for number, (x, y) in enumerate(Task(1).batches(steps=240)):
        if jump and number == step:
            for group in chosen.param_groups:
                group[jump] *= 100
        chosen.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        chosen.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_trainings_whose_learning_rate_or_weight_decay_jumps(optimizer: str, tmp_path: Path) -> None:
    for jump, latest in (("lr", 110), ("weight_decay", 239)):
        steps = [
            finding.step
            for finding in evaluate_training(
                lambda hook, jump=jump: trained(hook, optimizer, jump=jump),  # type: ignore[misc]
                "hyperparameter_jump",
                tmp_path / jump,
                config=EVERYTHING,
            )
        ]
        if (optimizer, jump) != ("AdamW", "weight_decay"):  # 2e-3 of a weight a step: a third takes 180 steps
            assert steps, jump
            assert 100 <= steps[0] <= latest


SCHEDULES: dict[str, Schedule] = {
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 40, eta_min=1e-7),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=240),
    "cyclical": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 1e-5, 0.1, step_size_up=30, cycle_momentum=False
    ),
    "warm-up from zero": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 60)),
    "warm-up in stages": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, lambda step: 10.0 ** min(0, step // 40 - 3)
    ),
    "decay in stages": lambda optimizer: lr_scheduler.StepLR(optimizer, 50, 0.1),
}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedules_are_ignored(name: str, tmp_path: Path) -> None:
    outcome = evaluate_training(
        lambda hook: trained(hook, "SGD", SCHEDULES[name]), "hyperparameter_jump", tmp_path, config=EVERYTHING
    )
    assert outcome == []
