"""When the loss leaves its range, everything is measured, including tensors that are not due."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.sdk.training import batches, recorded, small_model
from watchstep import Cadence, CaptureConfig, Hook

SELDOM = {
    name: Cadence(every=1000)
    for name in ("losses", "weights", "biases", "gradients", "activations", "updates")
}
ONSET, BURST = 60, list(range(60, 65))


def trained(
    store: Path, *, factor: float = 50.0, logged: bool = False, gate: bool = True
) -> tuple[dict[str, list[int]], dict[str, int], list[float]]:
    """The steps of some tensors' records, counts of health, and the losses."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = CaptureConfig({**SELDOM, "losses": Cadence()}, system=None, gate=gate)
    hook = Hook(store, config=config)
    hook.watch(model, optimizer)
    losses = []
    for step, (x, y) in enumerate(batches(90)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) * (factor if step == ONSET else 1.0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if logged:
            hook.log(loss=losses[-1])
    run = recorded(hook)
    names = ("0.weight", "0.weight:gradient", "0.bias:update", "1:output")
    return {name: run.tensor(name).steps() for name in names}, hook.health["counts"], losses


@pytest.mark.parametrize("logged", [False, True])
def test_an_onset_is_measured_from_its_own_step_on(logged: bool, tmp_path: Path) -> None:
    steps, counts, _ = trained(tmp_path, logged=logged)
    for name in ("0.weight", "0.weight:gradient", "0.bias:update"):
        assert steps[name] == [0, *BURST], name
    assert steps["1:output"] == [0, *BURST], "the outputs of the bad batch are still there at backward"
    assert counts["measured_onsets"] == 1


def test_sound_steps_and_a_gate_that_is_off_measure_nothing_more(tmp_path: Path) -> None:
    steps, counts, _ = trained(tmp_path / "sound", factor=1.0)
    assert all(recorded_steps == [0] for recorded_steps in steps.values())
    assert "measured_onsets" not in counts
    steps, _, _ = trained(tmp_path / "off", gate=False)
    assert all(recorded_steps == [0] for recorded_steps in steps.values())


def test_the_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    _, _, watched = trained(tmp_path / "watched")
    _, _, ungated = trained(tmp_path / "ungated", gate=False)
    assert watched == ungated


def test_fewer_gradients_than_ever_are_an_onset(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    hook = Hook(tmp_path, config=CaptureConfig({**SELDOM, "losses": Cadence()}, system=None))
    hook.watch(model, optimizer)
    for step, (x, y) in enumerate(batches(90)):
        optimizer.zero_grad()
        with torch.set_grad_enabled(step < ONSET):
            found = model[:3](x)
        nn.functional.cross_entropy(model[3](found), y).backward()
        optimizer.step()
    run = recorded(hook)
    assert run.tensor("3.weight:gradient").steps() == [0, *BURST]
    assert run.tensor("0.weight:gradient").steps() == [0]
    assert run.tensor("0.weight:update").steps() == [0, *BURST]
