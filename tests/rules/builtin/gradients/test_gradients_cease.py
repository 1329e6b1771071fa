from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.rules.recording import evaluate_training
from tests.rules.trainings.parts import Task
from watchstep import Hook

ONSET = 60


class Parts(nn.Module):
    """An encoder of two layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
        self.way: Callable[[Parts, Tensor], Tensor] = lambda parts, x: parts.encoder(x)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.way(self, x))
        return found


def without_gradients(parts: Parts, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = parts.encoder(x)
    return found


def found(
    folder: Path,
    change: Callable[[Parts], None],
    *,
    zeros: bool = False,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> list[tuple[int, str]]:
    def train(hook: Hook) -> None:
        torch.manual_seed(0)
        model = Parts()
        updates = optimizer(model.parameters(), lr=0.01)  # type: ignore[call-arg]
        hook.watch(model, updates)
        for step, (x, y) in enumerate(Task(1).batches(steps=100)):
            if step == ONSET:
                change(model)
            updates.zero_grad(set_to_none=not zeros)
            nn.functional.cross_entropy(model(x), y).backward()
            updates.step()

    outcome = evaluate_training(train, "gradients_cease", folder)
    return [(finding.step, finding.tensor) for finding in outcome]


BOTH = [(ONSET + 3, "encoder.0.weight:update"), (ONSET + 3, "encoder.2.weight:update")]


def test_an_encoder_under_no_grad_from_some_step_on(tmp_path: Path) -> None:
    def change(model: Parts) -> None:
        model.way = without_gradients

    assert found(tmp_path / "none", change)[:2] == BOTH
    assert found(tmp_path / "zeros", change, zeros=True, optimizer=torch.optim.AdamW)[:2] == BOTH


def test_what_is_frozen_detached_later_or_left_out_is_ignored(tmp_path: Path) -> None:
    def freeze(model: Parts) -> None:
        model.encoder.requires_grad_(requires_grad=False)

    def leave_out(model: Parts) -> None:
        model.way = lambda _, x: torch.tanh(x @ torch.ones(20, 32))

    def middle(model: Parts) -> None:
        inner = model.encoder[2]
        model.way = lambda parts, x: parts.encoder[0](x).tanh() + inner(parts.encoder[0](x).tanh()).detach()

    assert found(tmp_path / "frozen", freeze) == []
    assert found(tmp_path / "not computed", leave_out) == []
    assert found(tmp_path / "amid others", middle) == []


def test_a_head_that_is_trained_alone_from_the_start_is_no_case_of_it(tmp_path: Path) -> None:
    def train(hook: Hook) -> None:
        torch.manual_seed(0)
        model = Parts()
        model.way = without_gradients
        updates = torch.optim.SGD(model.parameters(), lr=0.01)
        hook.watch(model, updates)
        for x, y in Task(1).batches(steps=60):
            updates.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            updates.step()

    assert evaluate_training(train, "gradients_cease", tmp_path) == []
