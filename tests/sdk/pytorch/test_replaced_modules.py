"""Programs that put other modules into a watched model: those are observed from the next step on, and not the old ones."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.sdk.training import EVERY_STEP, recorded
from watchstep import Cadence, Collection, Hook
from watchstep.format.bundle import bundle_keys, open_bundle
from watchstep.pytorch.bundles.values import torch_tensor
from watchstep.pytorch.watch import _MAX_CHANGES
from watchstep.store.store import Store

ALL = {
    "activations": Collection(Cadence()),
    "buffers": Collection(Cadence(), roles=("buffer",)),
}
REPLACED, STEPS, BATCH, WIDTH = 3, 8, 6, 4


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def trained(
    hook: Hook | None, *, bad: int | None = None, each_step: bool = False
) -> tuple[nn.Sequential, weakref.ref[nn.Module]]:
    """Train a model whose middle part is replaced before a step. Returns it, and a reference to the module that was replaced."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block(), nn.ReLU(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = weakref.ref(model[1])
    if hook is not None:
        hook.watch(model, optimizer)
    for step in range(_MAX_CHANGES + 3 if each_step else STEPS):
        if step == REPLACED or each_step:
            model[1] = block()
            model[1][1].running_mean.fill_(5.0)  # type: ignore[index]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(BATCH, WIDTH)
        if step == bad:
            x[0, 0] = math.nan
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, old


def test_outputs_and_buffers_of_new_modules_are_recorded_and_old_ones_are_released(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=replace(EVERY_STEP, collections=ALL))
    model, old = trained(hook)
    plain, _ = trained(None)
    for watched_parameter, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(watched_parameter, parameter)
    gc.collect()
    assert old() is None
    run = recorded(hook)
    for name in ("1.0:output", "1.1:output", "3:output"):
        assert run.tensor(name).steps() == list(range(STEPS))
    means = run.tensor("1.1.running_mean").statistics()["mean"].to_pylist()
    assert max(map(abs, means[:REPLACED])) < 1
    # Momentum 0.1, and outputs of a magnitude of one.
    assert 4 < means[REPLACED] < 5
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_bundle_has_the_buffers_of_new_modules(tmp_path: Path) -> None:
    hook = Hook(tmp_path)
    trained(hook, bad=REPLACED)
    hook.close()
    store = Store.open(hook.run_url)
    bundle = open_bundle(store, bundle_keys(store)[0].path)
    assert torch_tensor(*bundle.read("buffers/1.1.running_mean")).tolist() == [5.0] * WIDTH


def test_a_skipped_update_restores_running_statistics_of_new_modules(tmp_path: Path) -> None:
    hook = Hook(tmp_path, on_nonfinite="skip")
    model, _ = trained(hook, bad=REPLACED + 1)
    hook.close()
    assert hook.health["counts"]["skipped_updates"] == 1
    assert all(bool(buffer.isfinite().all()) for buffer in model.buffers())


def test_a_program_that_replaces_modules_at_each_step_has_a_note(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    trained(hook, each_step=True)
    run = recorded(hook)
    assert run.tensor("1.0:output").steps() == list(range(_MAX_CHANGES))
    assert f"before {_MAX_CHANGES} steps" in hook.health["notes"]["modules"]


@pytest.mark.parametrize("added", [True, False])
def test_modules_that_are_added_or_removed(tmp_path: Path, added: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = Hook(tmp_path, config=EVERY_STEP)
    hook.watch(model, optimizer)
    for step in range(4):
        if step == 2 and added:
            model.append(nn.Linear(WIDTH, WIDTH))
        elif step == 2:
            del model[1]
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        optimizer.step()
    run = recorded(hook)
    assert run.tensor("0:output").steps() == [0, 1, 2, 3]
    if added:
        assert run.tensor("2:output").steps() == [2, 3]
    else:
        assert run.tensor("1:output").steps() == [0, 1]
