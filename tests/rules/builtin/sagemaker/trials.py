"""Small trainings, recorded by a hook that is given the rule, whose tensors are saved beside it element by element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from tests.rules.builtin.sagemaker.definitions import Array, Verdict
from tests.rules.runs import all_at_once
from watchstep import CaptureConfig, Hook, open_run
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import RuleHealth

EVERY_STEP = CaptureConfig(overhead_budget=None)


@dataclass
class Saved:
    """What SageMaker's hook would save at each step: weights before the update, gradients, inputs and outputs of modules."""

    step: int = 0
    tensors: dict[str, dict[int, Array]] = field(default_factory=dict)

    def save(self, name: str, value: Tensor) -> None:
        self.tensors.setdefault(name, {})[self.step] = value.detach().clone().numpy()

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for name, module in model.named_modules():
            if name and not list(module.children()):
                module.register_forward_pre_hook(partial(self._given, name))
                module.register_forward_hook(partial(self._gave, name))
        optimizer.register_step_pre_hook(partial(self._before_step, model))

    def matching(self, ending: str) -> dict[str, dict[int, Array]]:
        return {name: steps for name, steps in self.tensors.items() if name.endswith(ending)}

    def _given(self, name: str, _module: nn.Module, args: Any) -> None:
        self.save(f"{name}:input", args[0])

    def _gave(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        self.save(f"{name}:output", output)

    def _before_step(self, model: nn.Module, *_: Any) -> None:
        for name, parameter in model.named_parameters():
            self.save(name, parameter)
            if parameter.grad is not None:
                self.save(f"{name}:gradient", parameter.grad)


Train = Callable[[Hook, Saved], None]


def judged(
    folder: Path, rule: str, params: dict[str, Any], train: Train, config: CaptureConfig = EVERY_STEP
) -> tuple[Verdict, Saved]:
    """Train, and return the steps at which the rule fires."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rules.yaml").write_text(
        yaml.safe_dump({"rules": [{"rule": rule, "params": params}]}), encoding="utf-8"
    )
    saved = Saved()
    with Hook(folder, rules=folder / "rules.yaml", config=config) as hook:
        train(hook, saved)
    assert not hook.health["faults"]
    outcome = all_at_once(RuleConfig(rule=rule, params=params), open_run(hook.run_url).rows())
    assert outcome.memory.health is not RuleHealth.ERROR, outcome.memory.problem
    return {(finding.step, finding.tensor) for finding in outcome.findings}, saved


@dataclass(frozen=True)
class Classifier:
    """A small classifier and how it is trained.

    Attributes:
        model: makes it.
        rate: the learning rate, or one for each step.
        scale: of the inputs.
        batch: examples of a step.
        steps: how many.
        touch: called with the model before each step.
    """

    model: Callable[[], nn.Module]
    rate: float = 0.1
    scale: float = 1.0
    batch: int = 64
    steps: int = 8
    touch: Callable[[int, nn.Module], None] = lambda _step, _model: None

    def __call__(self, hook: Hook, saved: Saved) -> None:
        """Train it."""
        torch.manual_seed(0)
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate)
        hook.watch(model, optimizer)
        saved.watch(model, optimizer)
        for step in range(self.steps):
            saved.step = step
            self.touch(step, model)
            inputs = self.scale * torch.randn(self.batch, 4)
            labels = (inputs.sum(1) > 0).long()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            saved.save("loss", loss)
            optimizer.step()


def dense(*activation: nn.Module, first: float = 1.0, width: int = 16) -> nn.Sequential:
    """Two layers with an activation between them; weights of the first are so many times the usual."""
    model = nn.Sequential(nn.Linear(4, width), *activation, nn.Linear(width, 2))
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(first)
    return model


def numbers(steps: dict[int, Array]) -> dict[int, float]:
    """A scalar by step."""
    return {step: float(np.asarray(value)) for step, value in steps.items()}
