"""Modules that are called many times in a step: hooks go after the first calls where they cost too much, and come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.sdk.training import recorded, watching
from watchstep import Cadence, CaptureConfig, Collection, Hook
from watchstep.pytorch.outputs.pass_hooks import MOST_CALLS

CALLS = MOST_CALLS + 4
STEPS = 30
BATCH, WIDTH = 2, 3
OVERLOADED = CaptureConfig(
    overhead_budget=1e-9, system=None, collections={"activations": Collection(Cadence(every=1))}
)
"""A budget that the fixed cost of steps always exceeds, and activations at every step whatever they cost."""

Step = Callable[[nn.Module, Tensor], Tensor]


class Recurrent(nn.Module):
    """A cell that its model calls at each time step, and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, calls: int = CALLS) -> Tensor:
        for _ in range(calls):
            x = torch.tanh(self.cell(x))
        output: Tensor = self.last(x)
        return output


def by_the_model(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output


def by_the_program(model: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(model, Recurrent)
    for _ in range(CALLS):
        x = torch.tanh(model.cell(x))
    output: Tensor = model.last(x)
    return output


def solved(model: nn.Module, x: Tensor) -> Tensor:
    """Call the model itself many times, as a solver of a differential equation does."""
    for _ in range(CALLS):
        x = x + 0.1 * model(x, 1)
    return x


def trained(
    step: Step, store: Path | None = None, config: CaptureConfig = OVERLOADED
) -> tuple[nn.Module, Hook | None]:
    """Train a model, recorded to a store if there is one. Returns it and the closed hook."""
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = None if store is None else watching(store, model, optimizer, run="r", config=config)
    for number in range(STEPS):
        x = torch.full((BATCH, WIDTH), 0.01 * number)
        optimizer.zero_grad()
        step(model, x).square().sum().backward()
        optimizer.step()
    if hook is not None:
        hook.close()
    return model, hook


def recorded_alike(step: Step, store: Path) -> Hook:
    """Train with and without a recording, which change the model alike and leave no hook on it. Returns the hook."""
    model, hook = trained(step, store)
    plain, _ = trained(step)
    for watched_parameter, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(watched_parameter, parameter)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert hook is not None
    return hook


@pytest.mark.parametrize(
    ("step", "paused", "calls"),
    [
        (by_the_model, "cell", {"cell:output": MOST_CALLS, "last:output": 1}),
        (by_the_program, "cell", {"cell:output": MOST_CALLS, "last:output": 1}),
        (solved, "model", {"cell:output": MOST_CALLS, "last:output": MOST_CALLS}),
    ],
)
def test_the_first_calls_of_each_pass_are_observed_where_hooks_cost_too_much(
    tmp_path: Path, step: Step, paused: str, calls: dict[str, int]
) -> None:
    hook = recorded_alike(step, tmp_path)
    run = recorded(hook)
    for name, expected in calls.items():
        counts = run.tensor(name).statistics()["count"].to_pylist()
        of_all = CALLS if expected == MOST_CALLS else 1
        assert (counts[0], counts[-1]) == (of_all * BATCH * WIDTH, expected * BATCH * WIDTH)
        assert len(counts) == STEPS
    note = hook.health["notes"]["calls"]
    assert f"first {MOST_CALLS} calls" in note
    assert f" of {paused}: " in note


def test_calls_are_counted_anew_after_each_backward_pass(tmp_path: Path) -> None:
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = watching(tmp_path, model, optimizer, run="r", config=OVERLOADED)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(CALLS):
            model(torch.ones(BATCH, WIDTH), 1).sum().backward()
        optimizer.step()
    run = recorded(hook)
    counts = run.tensor("cell:output").statistics()["count"].to_pylist()
    assert counts == [CALLS * BATCH * WIDTH] * STEPS
    assert "calls" not in hook.health["notes"]


def test_all_calls_are_observed_without_a_budget(tmp_path: Path) -> None:
    config = CaptureConfig(overhead_budget=None, system=None)
    _, hook = trained(by_the_model, tmp_path, config)
    assert hook is not None
    counts = recorded(hook).tensor("cell:output").statistics()["count"].to_pylist()
    assert counts == [CALLS * BATCH * WIDTH] * STEPS


def after_acting(model: nn.Module, x: Tensor) -> Tensor:
    """Call the model without gradients many times, as a policy that acts, and then train it."""
    with torch.no_grad():
        for _ in range(CALLS):
            model(x, 1)
    output: Tensor = model(x, 1)
    return output


def after_acting_by_parts(model: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(model, Recurrent)
    with torch.no_grad():
        for _ in range(2 * CALLS):
            model.last(model.cell(x))
    output: Tensor = model.last(model.cell(x))
    return output


def after_generating(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    after_acting(model, x)
    model.train()
    output: Tensor = model(x, 1)
    return output


@pytest.mark.parametrize("step", [after_acting, after_acting_by_parts, after_generating])
def test_a_pass_of_training_is_observed_after_many_passes_that_are_not(tmp_path: Path, step: Step) -> None:
    hook = recorded_alike(step, tmp_path)
    run = recorded(hook)
    for name in ("cell:output", "last:output"):
        rows = run.tensor(name).statistics().to_pylist()
        assert [row["count"] for row in rows if row["mode"] == "train"] == [BATCH * WIDTH] * STEPS


def test_passes_of_a_mode_with_a_fixed_cadence_are_all_observed(tmp_path: Path) -> None:
    every_pass = Collection(Cadence(every=1), modes={"eval": Cadence(every=1)})
    config = CaptureConfig(overhead_budget=1e-9, system=None, collections={"activations": every_pass})
    _, hook = trained(after_generating, tmp_path, config)
    assert hook is not None
    rows = recorded(hook).tensor("cell:output").statistics().to_pylist()
    observed = sum(row["count"] for row in rows if row["mode"] == "eval")
    assert observed == STEPS * (CALLS + 1) * BATCH * WIDTH
