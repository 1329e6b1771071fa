"""Running statistics of normalisation layers, and the metadata of these layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.sdk.training import EVERY_STEP, batches, recorded
from watchstep import Cadence, CaptureConfig, Collection, Hook, Run

STEPS = 26


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def trained(
    store: Path, model: nn.Module, config: CaptureConfig | None = None, *, model_in: bool = True
) -> Run:
    """Train with the model in training mode, or in evaluation mode."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    hook = Hook(store, config=config)
    hook.watch(model, optimizer)
    for x, y in batches(STEPS):
        model.train(model_in)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return recorded(hook)


def metadata_of(run: Run, name: str) -> dict[str, Any]:
    rows = run.tensor(name).statistics().to_pydict()
    return {key.removeprefix("probe."): column for key, column in rows.items()}


def test_running_statistics_are_measured_now_and_then(tmp_path: Path) -> None:
    model = normalised()
    run = trained(tmp_path, model)
    rows = metadata_of(run, "1.running_var")
    assert rows["step"] == [0, 25]
    assert rows["batches_tracked"] == [1.0, 26.0]
    assert rows["training"] == rows["model_training"] == rows["learns"] == [1.0, 1.0]
    assert rows["mean"][1] == pytest.approx(model[1].get_buffer("running_var").mean().item())
    info = run.tensor("1.running_mean").info
    assert (info.role, info.module, info.module_type, info.shape) == ("buffer", "1", "BatchNorm1d", (6,))


def test_a_layer_in_evaluation_mode(tmp_path: Path) -> None:
    rows = metadata_of(trained(tmp_path, normalised(), EVERY_STEP, model_in=False), "1.running_var")
    assert set(rows["training"]) == set(rows["model_training"]) == {0.0}
    assert set(rows["learns"]) == {1.0}
    assert rows["affine_square"][0] == pytest.approx(1.0)
    assert (set(rows["min"]), set(rows["batches_tracked"])) == ({1.0}, {0.0})


def test_a_frozen_layer_does_not_learn(tmp_path: Path) -> None:
    model = normalised()
    model[1].requires_grad_(requires_grad=False)
    assert set(metadata_of(trained(tmp_path, model), "1.running_var")["learns"]) == {0.0}


def test_a_layer_without_a_scale_or_a_count(tmp_path: Path) -> None:
    model = normalised()
    plain = model[1] = nn.BatchNorm1d(6, affine=False)
    plain.num_batches_tracked = None
    rows = metadata_of(trained(tmp_path, model), "1.running_var")
    assert set(rows["learns"]) == {0.0}
    assert rows.get("batches_tracked", [None, None]) == [None, None]


def test_they_are_a_collection_like_others(tmp_path: Path) -> None:
    only = Collection(Cadence(every=2), exclude=".*mean")
    run = trained(tmp_path / "a", normalised(), CaptureConfig({"buffers": only}))
    assert [name for name in run.tensors() if "running" in name] == ["1.running_var"]
    assert len(metadata_of(run, "1.running_var")["step"]) == STEPS / 2
    mine = Collection(Cadence(every=2), include="1\\.")
    assert (
        "1.running_var" not in trained(tmp_path / "b", normalised(), CaptureConfig({"mine": mine})).tensors()
    )
    mine = Collection(Cadence(every=2), roles=("buffer",))
    assert "1.running_var" in trained(tmp_path / "c", normalised(), CaptureConfig({"mine": mine})).tensors()


def test_a_layer_without_running_statistics_has_none(tmp_path: Path) -> None:
    model = normalised()
    model[1] = nn.BatchNorm1d(6, track_running_stats=False)
    assert not [name for name in trained(tmp_path, model).tensors() if "running" in name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: a model on two devices is not proven")
def test_layers_on_two_devices(tmp_path: Path) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.host = normalised()
            self.device = nn.BatchNorm1d(2).cuda()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            host: torch.Tensor = self.host(x)
            device: torch.Tensor = self.device(host.cuda())
            return device.cpu()

    run = trained(tmp_path, Split(), EVERY_STEP, model_in=False)
    for name in ("host.1.running_var", "device.running_var"):
        rows = metadata_of(run, name)
        assert rows["affine_square"][0] == pytest.approx(1.0)
        assert set(rows["batches_tracked"]) == {0.0}


class Noisy(nn.Module):
    """A parametrization that uses random numbers each time it is read."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 0.01 * torch.randn_like(weight)


def losses_of(store: Path | None) -> list[float]:
    """Losses of a training with noise on the scale of its normalization layer, recorded or not."""
    model = normalised()
    nn.utils.parametrize.register_parametrization(model[1], "weight", Noisy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = None if store is None else Hook(store, config=EVERY_STEP)
    if hook is not None:
        hook.watch(model, optimizer)
    losses = []
    for number, (x, y) in enumerate(batches(STEPS)):
        model[1].train(number % 5 > 0)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if hook is not None:
        hook.close()
        assert not hook.health["faults"]
    return losses


def test_a_parametrization_of_the_scale_is_not_run(tmp_path: Path) -> None:
    assert losses_of(tmp_path) == losses_of(None)
