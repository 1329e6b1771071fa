"""A small training to record in tests: seeded, on the host, with one thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from watchstep import CaptureConfig, Hook, Run, open_run
from watchstep.errors import NotFoundError

EVERY_STEP = CaptureConfig(overhead_budget=None, system=None)
"""Everything at every step without an overhead budget, and no system figures: counts in tests must not depend on the clock."""


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def recorded(hook: Hook) -> Run:
    """Close a hook that had no faults, and open what it recorded."""
    hook.close()
    assert not hook.health["faults"]
    return open_run(hook.run_url)


def wait_until_there(hook: Hook) -> Run:
    """Open the run of a hook that continues, as soon as the store has it."""
    while True:
        try:
            return open_run(hook.run_url)
        except NotFoundError:
            hook._session.queue.wake.set()


def small_model(seed: int = 0) -> nn.Sequential:
    """Eight inputs, two classes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 2))


def batches(steps: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Random inputs and labels, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(32, 8, generator=generator), torch.randint(0, 2, (32,), generator=generator))
        for _ in range(steps)
    ]


@dataclass
class Training:
    """The plain loop.

    Attributes:
        model: as it is called; wrapped or compiled, maybe.
        optimizer: updates it.
        losses: as the program sees them.
    """

    model: nn.Module = field(default_factory=small_model)
    optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def run(self, steps: int, each: Callable[[int, Tensor], None] | None = None) -> list[float]:
        """Train for some steps; ``each`` is called after every update."""
        for step, (x, y) in enumerate(batches(steps)):
            loss = train_step(self.model, self.optimizer, x, y)
            self.losses.append(loss.item())
            if each is not None:
                each(step, loss)
        return self.losses


class Composed(nn.Module):
    """A module whose forward pass is a function of itself and its inputs, with parts and buffers by name."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def closure_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Callable[[], Tensor]:
    """The closure of a step, as LBFGS calls it."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def with_sgd(model: AnyModule, lr: float = 0.1) -> tuple[AnyModule, torch.optim.SGD]:
    """A model and an optimizer of all its parameters."""
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def watching(
    store: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> Hook:
    """A hook that watches a model, and records everything at every step if the options do not say otherwise."""
    hook = Hook(store, **{"config": EVERY_STEP, **options})
    hook.watch(model, optimizer)
    return hook


def skipping(
    store: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    policy: str = "skip",
    **options: Any,
) -> Hook:
    """A hook with the built-in configuration and a policy for updates by gradients that are not finite."""
    return watching(store, model, optimizer, config=None, on_nonfinite=policy, **options)


def watched_training(
    store: Path | str, training: Training | None = None, **options: Any
) -> tuple[Hook, Training]:
    """The plain loop, watched."""
    training = training or Training()
    return watching(store, training.model, training.optimizer, **options), training


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One step of the plain loop. Returns the loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss
