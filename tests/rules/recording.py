"""Trainings that are recorded and evaluated by one rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.rules.runs import all_at_once
from watchstep import CaptureConfig, Hook, open_run
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.rule import Finding

EVERYTHING = CaptureConfig(overhead_budget=None)
"""Adaptive collections at every step, without a budget: findings must not depend on the clock."""


def evaluate_training(
    train: Callable[[Hook], None],
    rule: str,
    folder: Path,
    params: dict[str, object] | None = None,
    *,
    config: CaptureConfig = EVERYTHING,
) -> list[Finding]:
    """Train with a hook, and evaluate the recorded run by one rule."""
    with Hook(folder, config=config) as hook:
        train(hook)
    assert not hook.health["faults"]
    outcome = all_at_once(RuleConfig(rule=rule, params=params or {}), open_run(hook.run_url).rows())
    assert outcome.memory.health is not RuleHealth.ERROR, outcome.memory.problem
    return outcome.findings


def fit(
    hook: Hook,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    before: Callable[[int], None] = lambda _: None,
    after: Callable[[int], None] = lambda _: None,
) -> None:
    """Train a watched classifier; call the program's own lines before and after each step."""
    hook.watch(model, optimizer)
    for step, (x, y) in enumerate(batches):
        before(step)
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        after(step)
