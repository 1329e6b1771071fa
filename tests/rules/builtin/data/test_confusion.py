from __future__ import annotations

from pathlib import Path

import torch
from torch import nn, optim

from tests.rules.recording import evaluate_training
from tests.rules.trainings.parts import Task
from watchstep import Hook


def trained(hook: Hook, *, exchanged: bool) -> None:
    """Train on three classes; a tenth of the second's labels, or all of them, are the third's now and then."""
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    task = Task(1, classes=3, noise=0.0)
    own = torch.Generator().manual_seed(0)
    for x, y in task.batches(64, 300):
        mixed = (y == 1) & (torch.rand(len(y), generator=own) < 0.5)
        labels = torch.where(mixed, 2, y) if exchanged else y
        optimizer.zero_grad()
        outputs = model(x)
        nn.functional.cross_entropy(outputs, labels).backward()
        optimizer.step()
        hook.record(labels=y, outputs=outputs)
        hook.step()


def test_two_classes_whose_labels_are_mixed_up_and_the_twin(tmp_path: Path) -> None:
    torch.manual_seed(0)
    late: dict[str, object] = {"from_step": 250, "examples": 100}
    found = evaluate_training(lambda hook: trained(hook, exchanged=True), "confusion", tmp_path / "a", late)
    assert {finding.tensor for finding in found} == {"confusion/1"}
    assert found[0].step >= 250
    assert "were predicted right" in found[0].message
    assert "as class 2" in found[0].message
    torch.manual_seed(0)
    assert (
        evaluate_training(lambda hook: trained(hook, exchanged=False), "confusion", tmp_path / "b", late)
        == []
    )


def test_the_two_tests_and_their_limits(tmp_path: Path) -> None:
    labels = torch.tensor([0] * 20 + [1] * 20 + [2] * 5)
    guesses = torch.tensor([0] * 17 + [1] * 3 + [1] * 20 + [0] * 5)

    def once(hook: Hook) -> None:
        hook.record(labels=labels, outputs=guesses)

    def found(name: str, **params: object) -> list[tuple[str, float]]:
        return [
            (finding.tensor, finding.value)
            for finding in evaluate_training(once, "confusion", tmp_path / name, params)
        ]

    assert found("a") == [("confusion/0", 0.85)]
    assert found("b", min_diag=0.8) == [("confusion/0", 0.15)]
    assert found("c", min_diag=0.8, max_off_diag=0.2) == []
    assert found("d", min_diag=0.8, max_off_diag=0.2, examples=5) == [("confusion/2", 0.0)]
