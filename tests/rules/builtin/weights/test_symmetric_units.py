from __future__ import annotations

from pathlib import Path

import torch
from torch import nn, optim

from tests.rules.recording import evaluate_training
from tests.rules.trainings.parts import Task
from watchstep import Hook

CONSTANT = 0.05


def trained(hook: Hook, *, constant: tuple[int, ...], value: float = CONSTANT, adam: bool = False) -> None:
    """Train three layers, of which some begin at a constant."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 5))
    for place in constant:
        layer = model[place]
        nn.init.constant_(layer.weight, value)  # type: ignore[arg-type]  # a Tensor
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # a Tensor
    optimizer = optim.AdamW(model.parameters(), 1e-2) if adam else optim.SGD(model.parameters(), 0.1)
    hook.watch(model, optimizer)
    for x, y in Task(1).batches(steps=30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def found(folder: Path, *constant: int, value: float = CONSTANT, adam: bool = False) -> set[str]:
    findings = evaluate_training(
        lambda hook: trained(hook, constant=constant, value=value, adam=adam), "symmetric_units", folder
    )
    return {finding.tensor for finding in findings}


def test_layers_that_begin_at_one_number_and_their_twins(tmp_path: Path) -> None:
    for adam in (False, True):
        assert found(tmp_path / f"a{adam}", 0, 2, 4, adam=adam) == {"0.weight", "2.weight"}
        assert found(tmp_path / f"b{adam}", 0, 2, adam=adam) == {"0.weight"}
        assert found(tmp_path / f"c{adam}", adam=adam) == set()


def test_a_head_that_begins_at_zero_parts(tmp_path: Path) -> None:
    assert found(tmp_path / "a", 4, value=0.0) == set()
    assert found(tmp_path / "b", 2, 4, value=0.0, adam=True) == set()


def test_the_finding_states_how_far(tmp_path: Path) -> None:
    findings = evaluate_training(
        lambda hook: trained(hook, constant=(0, 2, 4)), "symmetric_units", tmp_path, {"records": 10}
    )
    assert "the 16 units of 0.weight have moved by" in findings[0].message
    assert findings[0].value < findings[0].threshold == 0.01
