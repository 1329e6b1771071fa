"""A recorder that sees full tensors at every step, with no code of Watchstep: what the oracle judges by."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BOUNDED = {nn.Sigmoid: (0.0, 1.0), nn.Tanh: (-1.0, 1.0)}
NEAR_BOUND = 0.01


@dataclass
class Seen:
    """Figures by step.

    Attributes:
        loss, validation: training losses by step; validation losses with their steps.
        gradient, weight, update: parameter → root mean squares by step; a gradient of NaN means that there was none.
        smallest_gradient: parameter → mean magnitude by step.
        dead: ReLU module → by step, which units were zero for the whole batch.
        saturated: sigmoid or tanh module → by step, the share of outputs near a bound.
        spread: layer → deviation of its output at the first step.
        identical: layers whose units all had the same weights at the first step.
        labels: how many of each class.
        not_finite: steps with a number that is none in losses, gradients, weights or outputs.
    """

    loss: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    gradient: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    smallest_gradient: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    weight: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    update: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    dead: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    saturated: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    spread: dict[str, float] = field(default_factory=dict)
    identical: set[str] = field(default_factory=set)
    labels: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    not_finite: set[int] = field(default_factory=set)


class Witness:
    """Takes the place of a hook, and of the clock, in a program's training."""

    def __init__(self, most_steps: int | None = None) -> None:
        self.seen = Seen()
        self._before: dict[str, Tensor] = {}
        self._left = most_steps

    def watch(self, model: Any, optimizer: Any = None, *, name: str | None = None) -> None:
        """Look at the model's parameters around each of the optimizer's steps, and at its modules' outputs."""
        del name
        parameters = dict(model.named_parameters())
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                self._look_at_first(path, module)
            if not list(module.children()):
                module.register_forward_hook(self._looking_at(path, module))
        optimizer.register_step_pre_hook(lambda *_: self._before_update(parameters))
        optimizer.register_step_post_hook(lambda *_: self._after_update(parameters))

    def log(self, values: Any = None, /, *, mode: Any = None, **scalars: Any) -> None:
        """Keep losses."""
        del values
        if "loss" not in scalars:
            return
        held = scalars["loss"]
        value = float(held.detach() if isinstance(held, Tensor) else held)
        if mode == "eval":
            self.seen.validation.append((len(self.seen.loss), value))
        else:
            self.seen.loss.append(value)
            self._check(torch.tensor(value))

    def record(self, values: Any = None, /, **given: Any) -> None:
        """Count labels that are classes."""
        del values
        labels = given.get("labels")
        if labels is not None and not labels.is_floating_point():
            for label in labels.flatten().tolist():
                self.seen.labels[label] += 1

    def step(self) -> None:
        """As a clock: nothing to do."""

    def _check(self, *tensors: Tensor) -> None:
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            self.seen.not_finite.add(len(self.seen.loss))

    def _look_at_first(self, path: str, module: nn.Linear | nn.Conv2d) -> None:
        weight = module.weight.detach().flatten(1)
        if len(weight) > 1 and bool((weight == weight[:1]).all()):
            self.seen.identical.add(path)

    def _looking_at(self, path: str, module: nn.Module) -> Any:
        def hook(_module: nn.Module, _given: Any, output: Any) -> None:
            if not module.training or not isinstance(output, Tensor):
                return
            held = output.detach().float()
            self._check(held)
            if isinstance(module, nn.Linear | nn.Conv2d):
                self.seen.spread.setdefault(path, float(held.std(correction=0)))
            if isinstance(module, nn.ReLU):
                others = [axis for axis in range(held.dim()) if axis != 1]
                self.seen.dead[path].append((held == 0).all(dim=others) if others else held == 0)
            bounds = BOUNDED.get(type(module))
            if bounds:
                margin = NEAR_BOUND * (bounds[1] - bounds[0])
                near = (held < bounds[0] + margin) | (held > bounds[1] - margin)
                self.seen.saturated[path].append(float(near.float().mean()))

        return hook

    def _before_update(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            weight = parameter.detach().double()
            self._before[name] = weight.clone()
            gradient = parameter.grad
            self.seen.weight[name].append(float(weight.pow(2).mean().sqrt()))
            if gradient is None:
                self.seen.gradient[name].append(float("nan"))
                continue
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            self._check(dense, parameter.detach())
            exact = dense.double()
            self.seen.gradient[name].append(float(exact.pow(2).mean().sqrt()))
            self.seen.smallest_gradient[name].append(float(exact.abs().mean()))

    def _after_update(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            change = parameter.detach().double() - self._before[name]
            self.seen.update[name].append(float(change.pow(2).mean().sqrt()))
