"""Outputs that are measured together have the values that they had when their layer returned them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.sdk.training import EVERY_STEP, watching
from watchstep import open_run

STEPS = 8


class Changing(nn.Module):
    """Changes outputs of its layers: by a rectifier in place, by a residual from step `late` on, and past the counter of changes."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.first, self.rectifier = nn.Linear(6, 6), nn.ReLU(inplace=True)
        self.second, self.third, self.last = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
        self.calls, self.late = 0, late

    def forward(self, x: Tensor) -> Tensor:
        x = self.rectifier(self.first(x))
        residual = self.second(x)
        if self.calls >= self.late:
            residual += x
        self.calls += 1
        bounded = self.third(residual)
        with torch.no_grad():
            bounded.data.mul_(0.5)
        return torch.as_tensor(self.last(bounded))


def means_at_return(model: nn.Module, seen: dict[str, list[float]]) -> None:
    """Note the mean of each layer's output when the layer returns it."""
    for name, module in model.named_children():

        def note(_module: nn.Module, _args: Any, output: Tensor, name: str = name) -> None:
            seen.setdefault(name, []).append(output.detach().double().mean().item())

        module.register_forward_hook(note)


@pytest.mark.parametrize("late", [0, 5])
def test_rows_have_the_values_at_the_return_of_a_layer(tmp_path: Path, late: int) -> None:
    torch.manual_seed(0)
    model, seen = Changing(late), dict[str, list[float]]()
    means_at_return(model, seen)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watching(tmp_path, model, optimizer, run="r", config=EVERY_STEP) as hook:
        for _ in range(STEPS):
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = open_run(tmp_path / "default" / "r")
    for name, means in seen.items():
        rows = run.tensor(f"{name}:output").rows
        # The only step that is missing is the first one at which a layer's output is changed that never was before.
        steps = [step for step in range(STEPS) if (name, step, late) != ("second", 5, 5)]
        assert rows.step.tolist() == steps
        assert rows.statistics.mean.tolist() == pytest.approx([means[step] for step in steps], rel=1e-5)
    assert hook.health["counts"].get("changed_outputs", 0) == (1 if late else 0)
    assert not hook.health["faults"]


def test_channels_of_outputs_measured_together_are_those_of_each_layer(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh())
    with torch.no_grad():
        torch.as_tensor(model[4].weight).mul_(30)
    outputs: dict[str, list[Tensor]] = {"1": [], "3": [], "5": []}
    for name, of_layer in outputs.items():
        model[int(name)].register_forward_hook(lambda *given, kept=of_layer: kept.append(given[2].clone()))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watching(tmp_path, model, optimizer, run="r", config=EVERY_STEP):
        for _ in range(STEPS):
            for _micro_batch in range(2):
                model(3 * torch.randn(3, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    run, numbers = open_run(tmp_path / "default" / "r"), list[float]()
    for name, of_layer in outputs.items():
        rows = run.tensor(f"{name}:output").rows
        of_steps = [torch.cat(of_layer[2 * step : 2 * step + 2]) for step in range(STEPS)]
        if name == "5":
            column, flags = "saturated_channels", [(y.abs() >= 0.98).all(0) for y in of_steps]
        else:
            column, flags = "dead_channels", [(y == 0).all(0) for y in of_steps]
        due = [float(each.sum()) for each in flags]
        assert rows.probes[column].tolist() == due
        numbers += due
        assert rows.statistics.count.tolist() == [2 * 3 * 6] * STEPS
    assert any(numbers)
    linear = run.tensor("4:output").rows
    assert all(map(math.isnan, linear.probes.get("channels", [math.nan])))


def test_rows_of_a_pass_have_times_in_the_order_of_its_layers(tmp_path: Path) -> None:
    """Rules name the first bad output of a pass by them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    order = (3, 0, 1, 2)  # not that of the registration

    def forward(x: Tensor) -> Tensor:
        for place in order:
            x = model[place](x)
        return x

    model.forward = forward  # type: ignore[method-assign,unused-ignore]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watching(tmp_path, model, optimizer, run="r", config=EVERY_STEP):
        for _ in range(STEPS):
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()
    run = open_run(tmp_path / "default" / "r")
    times = [run.tensor(f"{place}:output").rows.time_ns.tolist() for place in order]
    for of_step in zip(*times, strict=True):
        assert len(set(of_step)) == len(order)
        assert list(of_step) == sorted(of_step)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.calls += 1
        if self.calls == 6:
            raise ValueError("this batch is refused")
        return torch.as_tensor(self.second(x))


def test_a_pass_that_fails_leaves_the_rows_of_its_layers_to_its_own_step(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model, seen = Failing(), dict[str, list[float]]()
    means_at_return(model, seen)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watching(tmp_path, model, optimizer, run="r", config=EVERY_STEP):
        for batch in range(STEPS):
            try:
                model(torch.randn(4, 4)).sum().backward()
            except ValueError:
                assert batch == 5
                continue
            optimizer.step()
            optimizer.zero_grad()
    run = open_run(tmp_path / "default" / "r")
    second = run.tensor("second:output").rows
    assert second.step.tolist() == list(range(STEPS - 1))
    assert second.statistics.mean.tolist() == pytest.approx(seen["second"], rel=1e-5)
    first = run.tensor(
        "first:output"
    ).rows  # the refused batch is one of two of the step at which it was tried
    assert first.statistics.count.tolist() == [16, 16, 16, 16, 16, 32, 16]


class Updating(nn.Module):
    """Updates its weights within its own ``forward``, as meta-learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 1)
        self.optimizer: torch.optim.Optimizer | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.optimizer is not None
        with torch.enable_grad():
            self.outer(self.inner(x)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return x


def test_a_forward_pass_that_updates_has_its_rows_at_the_step_of_the_update(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, seen = Updating(), dict[str, list[float]]()
    means_at_return(model, seen)
    model.optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watching(tmp_path, model, model.optimizer, run="r", config=EVERY_STEP):
        for _ in range(STEPS):
            model(torch.randn(4, 4))
    rows = open_run(tmp_path / "default" / "r").tensor("inner:output").rows
    assert rows.step.tolist() == list(range(STEPS))
    assert rows.statistics.mean.tolist() == pytest.approx(seen["inner"], rel=1e-5)
