"""Parts of small trainings: data from a seed, models, optimizers, and their registration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]
Built = tuple[nn.Module, torch.optim.Optimizer, Loss, Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Training:
    """One training, in the words of the benchmark of detection."""

    build: Callable[[int], Built]
    steps: int
    truth: frozenset[str] = frozenset()
    also: frozenset[str] = frozenset()
    onset: int = 0

    @property
    def kind(self) -> str:
        """Whether something is wrong with it."""
        return "faulty" if self.truth else "healthy"


CASES: dict[str, Training] = {}
STEPS = 200
OFTEN = frozenset({"loss_not_decreasing", "slow_convergence", "oscillating_loss"})
"""Other rules that may fire for a training that does not learn."""

Make = Callable[[int], Built]


def training(
    *truth: str, also: tuple[str, ...] = (), steps: int = STEPS, onset: int = 0
) -> Callable[[Make], Make]:
    """Register a training, healthy where it has no truth."""

    def register(make: Make) -> Make:
        def build(seed: int) -> Built:
            torch.manual_seed(seed)
            return make(seed)

        CASES[make.__name__] = Training(build, steps, frozenset(truth), frozenset(also) | OFTEN, onset)
        return make

    return register


@dataclass
class Task:
    """Gaussian inputs, and classes by a random linear map; shape (size, features)."""

    seed: int
    features: int = 20
    classes: int = 5
    size: int = 800
    scale: float = 1.0
    noise: float = 0.3
    data: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        own = torch.Generator().manual_seed(self.seed + 5)
        x = torch.randn(self.size, self.features, generator=own)
        scores = x @ torch.randn(self.features, self.classes, generator=own)
        y = (scores + self.noise * torch.randn(scores.shape, generator=own)).argmax(1)
        self.data = (x * self.scale, y)

    def batches(self, batch: int = 32, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        return drawn(*self.data, self.seed, batch, steps)


def drawn(
    x: Tensor, y: Tensor, seed: int, batch: int = 32, steps: int = STEPS
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches drawn with replacement."""
    own = torch.Generator().manual_seed(seed + 9)
    for _ in range(steps):
        rows = torch.randint(0, len(x), (batch,), generator=own)
        yield x[rows], y[rows]


def layers(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU, extra: Any = None) -> nn.Sequential:
    """Linear layers with activations between them, and something after each activation."""
    stack: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes[:-1]):
        stack += [nn.Linear(inputs, outputs), act(), *([extra()] if extra else [])]
    return nn.Sequential(*stack, nn.Linear(sizes[-2], sizes[-1]))


def initialised(model: nn.Module, draw: Callable[[Tensor], Any], bias: float | None = None) -> nn.Module:
    """All linear weights drawn, biases constant."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            draw(module.weight)
            if bias is not None:
                nn.init.constant_(module.bias, bias)
    return model


def paced(optimizer: torch.optim.Optimizer, rate: Callable[[int], float]) -> torch.optim.Optimizer:
    """The optimizer with a learning rate that is multiplied step by step."""
    rates, done = [group["lr"] for group in optimizer.param_groups], count()

    def set_rate(*_: Any) -> None:
        share = rate(next(done))
        for group, whole in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = whole * share

    optimizer.register_step_pre_hook(set_rate)
    return optimizer


def adam(model: nn.Module, rate: float = 1e-3, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, **more)


def sgd(model: nn.Module, rate: float = 0.1, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
