"""A small training to record in tests: seeded, on the host, with one thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from watchstep import CaptureConfig, Hook, Run, open_run

EVERY_STEP = CaptureConfig(overhead_budget=None, system=None)
"""Everything at every step without an overhead budget, and no system figures: counts in tests must not depend on the clock."""


def recorded(hook: Hook) -> Run:
    """Close a hook that had no faults, and open what it recorded."""
    hook.close()
    assert not hook.health["faults"]
    return open_run(hook.run_url)


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
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
            if each is not None:
                each(step, loss)
        return self.losses
