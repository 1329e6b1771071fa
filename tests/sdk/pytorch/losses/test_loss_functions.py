from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as PyTorch's own documentation has it

from watchstep import Hook, open_run
from watchstep.pytorch.losses import loss_function

OUTPUT = torch.linspace(-1, 1, 24).reshape(8, 3)
CLASSES = torch.arange(8) % 3
ONE_HOT = F.one_hot(CLASSES, 3).float()


@pytest.mark.parametrize(
    ("loss", "function"),
    [
        (lambda output: F.cross_entropy(output, CLASSES), "NllLoss"),
        (lambda output: F.cross_entropy(output, CLASSES, reduction="none").mean(), "NllLoss"),
        (lambda output: F.cross_entropy(output.T[None], CLASSES[None, :3]), "NllLoss2D"),
        (lambda output: F.cross_entropy(output, CLASSES).double(), "NllLoss"),
        (lambda output: F.mse_loss(output, ONE_HOT), "MseLoss"),
        (lambda output: F.binary_cross_entropy_with_logits(output, ONE_HOT), "BinaryCrossEntropyWithLogits"),
        (lambda output: F.cross_entropy(output, CLASSES, reduction="sum"), ""),
        (lambda output: F.cross_entropy(output, CLASSES) / 4, ""),
        (lambda output: F.cross_entropy(output, CLASSES) + output.square().mean(), ""),
        (lambda output: F.cross_entropy(output, CLASSES).detach(), ""),
    ],
)
def test_a_plain_loss_is_named_by_its_function(loss: Callable[[Tensor], Tensor], function: str) -> None:
    output = OUTPUT[:3, :].T.contiguous() if function == "NllLoss2D" else OUTPUT
    assert loss_function(loss(output.clone().requires_grad_())) == function


@pytest.mark.parametrize("logged", ["tensor", "number", None])
def test_the_function_is_recorded_with_the_loss(tmp_path: Path, logged: str | None) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Hook(tmp_path) as hook:
        hook.watch(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(OUTPUT), CLASSES)
            loss.backward()
            optimizer.step()
            if logged:
                hook.log(loss=loss if logged == "tensor" else loss.item())
    catalogue = open_run(hook.run_url).rows().catalogue
    assert [info.module_type for info in catalogue if info.role == "loss"] == ["NllLoss"]
