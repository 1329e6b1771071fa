from __future__ import annotations

from pathlib import Path

import torch
from torch import nn, optim

from tests.rules.recording import said_of
from tests.rules.training_parts import Task
from watchstep import CaptureConfig, Hook


def trained(hook: Hook, *, late: bool, frozen: bool = False, average: bool = False) -> None:
    """Train a model whose head is replaced after or before the optimizer is made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
    if not late:
        model[2] = nn.Linear(16, 5)
    optimizer = optim.SGD(model.parameters(), 0.05)
    if late:
        model[2] = nn.Linear(16, 5)
    model[2].requires_grad_(requires_grad=not frozen)
    hook.watch(model, optimizer)
    for x, y in Task(1).batches(steps=101):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if average:
            with torch.no_grad():
                for parameter in model[2].parameters():
                    parameter.mul_(0.999)


def found(folder: Path, *, late: bool, frozen: bool = False, average: bool = False) -> list[tuple[int, str]]:
    findings = said_of(
        lambda hook: trained(hook, late=late, frozen=frozen, average=average),
        "absent_from_optimizer",
        folder,
        config=CaptureConfig(),
    )
    return [(finding.step, finding.tensor) for finding in findings]


def test_a_layer_that_is_made_after_the_optimizer_and_its_twin(tmp_path: Path) -> None:
    both = ["2.bias:unheld", "2.weight:unheld"]
    assert found(tmp_path / "a", late=True) == [(step, name) for step in (75, 100) for name in both]
    assert found(tmp_path / "b", late=False) == []


def test_what_is_frozen_or_moved_by_hand_is_left_alone(tmp_path: Path) -> None:
    assert found(tmp_path / "a", late=True, frozen=True) == []
    assert found(tmp_path / "b", late=True, average=True) == []
