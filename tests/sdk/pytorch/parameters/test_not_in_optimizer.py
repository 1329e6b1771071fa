"""Parameters that get gradients but belong to no optimizer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.sdk.training import batches, recorded, small_model
from watchstep import Hook, Run

STEPS = 51


def trained(store: Path, model: nn.Module, *optimizers: torch.optim.Optimizer, by_hand: bool = False) -> Run:
    hook = Hook(store)
    hook.watch(model, optimizers[0])
    for step, (x, y) in enumerate(batches(STEPS)):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizers[0].step()
        if step % 10 == 9:
            for optimizer in optimizers[1:]:
                optimizer.step()
        if by_hand:
            with torch.no_grad():
                model[0].weight.mul_(0.999)  # type: ignore[index]  # a Sequential
    return recorded(hook)


def not_in_optimizer(run: Run) -> list[str]:
    return sorted(name for name in run.tensors() if name.endswith(":not_in_optimizer"))


def test_gradients_of_parameters_of_no_optimizer(tmp_path: Path) -> None:
    model = small_model()
    model[2].requires_grad_(requires_grad=False)
    run = trained(tmp_path, model, torch.optim.SGD(model[3].parameters(), lr=0.1))
    assert not_in_optimizer(run) == ["0.bias:not_in_optimizer", "0.weight:not_in_optimizer"]
    rows = run.tensor("0.weight:not_in_optimizer").statistics().to_pydict()
    assert rows["step"] == [0, 25, 50]
    assert rows["probe.changed"] == [0.0, 0.0, 0.0]
    assert min(rows["abs_sum"]) > 0
    assert run.tensor("0.weight:not_in_optimizer").info.role == "not_in_optimizer"


def test_a_parameter_that_the_program_changes_by_hand(tmp_path: Path) -> None:
    model = small_model()
    run = trained(tmp_path, model, torch.optim.SGD(model[3].parameters(), lr=0.1), by_hand=True)
    assert run.tensor("0.weight:not_in_optimizer").statistics().to_pydict()["probe.changed"] == [
        0.0,
        1.0,
        1.0,
    ]
    assert run.tensor("0.bias:not_in_optimizer").statistics().to_pydict()["probe.changed"] == [0.0, 0.0, 0.0]


def test_another_optimizer_has_them_before_it_has_stepped(tmp_path: Path) -> None:
    model = small_model()
    head, trunk = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[3], model[:3]))
    assert not_in_optimizer(trained(tmp_path, model, head, trunk)) == []


def test_the_reason_why_a_parameter_is_omitted(tmp_path: Path) -> None:
    model = small_model()
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    scale = model.get_parameter("2.weight")
    optimizer = torch.optim.SGD([*weights, scale], lr=0.1)
    hook = Hook(tmp_path)
    hook.watch(model, optimizer)
    for step, (x, y) in enumerate(batches(STEPS)):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 30:
            del optimizer.param_groups[0]["params"][1]
    run = recorded(hook)
    assert not_in_optimizer(run) == [
        "0.bias:not_in_optimizer",
        "2.bias:not_in_optimizer",
        "3.bias:not_in_optimizer",
        "3.weight:not_in_optimizer",
    ]

    def column(tensor: str, name: str) -> list[float]:
        numbers: list[float] = (
            run.tensor(f"{tensor}:not_in_optimizer").statistics()[f"probe.{name}"].to_pylist()
        )
        return numbers

    # Steps 0, 25 and 50, and five whole steps from 31 on, where a parameter has left the optimizer.
    assert column("3.weight", "was_optimized") == [1.0] * 6
    assert column("0.bias", "was_optimized") == [0.0] * 8
    assert column("0.bias", "weight_optimized") == column("3.bias", "after_optimized") == [1.0] * 8
    assert column("2.bias", "weight_optimized") == [0.0] * 8
    assert column("3.bias", "weight_optimized") == [1.0, 1.0, *[0.0] * 6]
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert column("0.bias", "optimized_share")[-1] == (8 * 16 + 16) / elements


def test_nothing_is_recorded_if_optimizers_have_all_parameters(tmp_path: Path) -> None:
    model = small_model()
    assert not_in_optimizer(trained(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))) == []


def test_an_optimizer_of_a_copy_leaves_all_parameters_outside(tmp_path: Path) -> None:
    model = small_model()
    run = trained(tmp_path, model, torch.optim.SGD(small_model().parameters(), lr=0.1))
    assert not_in_optimizer(run) == sorted(f"{name}:not_in_optimizer" for name, _ in model.named_parameters())
    assert run.tensor("3.weight:not_in_optimizer").statistics().to_pydict()["step"] == [0, 25, 50]
