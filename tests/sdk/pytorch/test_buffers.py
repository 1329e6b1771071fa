"""Buffers: running statistics of normalisation layers are measured, and restored when a bad batch made them non-finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.sdk.training import (
    EVERY_STEP,
    Composed,
    batches,
    recorded,
    skipping,
    train_step,
    watching,
    with_sgd,
)
from watchstep import Cadence, CaptureConfig, Collection, Hook, Run, StopTraining

STEPS = 26


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def trained(
    store: Path, model: nn.Module, config: CaptureConfig | None = None, *, model_in: bool = True
) -> Run:
    """Train with the model in training mode, or in evaluation mode."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    hook = watching(store, model, optimizer, config=config)
    for x, y in batches(STEPS):
        model.train(model_in)
        train_step(model, optimizer, x, y)
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
    model = Composed(
        lambda module, x: module.device(module.host(x).cuda()).cpu(),
        host=normalised(),
        device=nn.BatchNorm1d(2).cuda(),
    )
    run = trained(tmp_path, model, EVERY_STEP, model_in=False)
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
    hook = None if store is None else watching(store, model, optimizer)
    losses = []
    for number, (x, y) in enumerate(batches(STEPS)):
        model[1].train(number % 5 > 0)
        losses.append(train_step(model, optimizer, x, y).item())
    if hook is not None:
        recorded(hook)
    return losses


def test_a_parametrization_of_the_scale_is_not_run(tmp_path: Path) -> None:
    assert losses_of(tmp_path) == losses_of(None)


def inputs(bad: int | None, steps: int = 5) -> list[torch.Tensor]:
    """Batches, one of them bad."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 4, generator=generator) for _ in range(steps)]
    if bad is not None:
        batches[bad][0] = math.nan
    return batches


def network() -> torch.nn.Sequential:
    """Has a normalization layer."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))


def train(hook: Hook | None, models: list[Any], batches: list[torch.Tensor], called: Any = None) -> None:
    """Train models one after another, all by one optimizer; ``called`` stands for the last."""
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    for model in models:
        if hook is not None:
            hook.watch(model, optimizer)
    for batch in batches:
        value = batch
        for model in [*models[:-1], called or models[-1]]:
            value = model(value)
        optimizer.zero_grad()
        value.square().mean().backward()
        optimizer.step()


def finite(model: torch.nn.Module) -> bool:
    return all(bool(buffer.isfinite().all()) for buffer in model.buffers())


def test_they_are_restored_without_bundles_too(tmp_path: Path) -> None:
    model, without = network(), network()
    with Hook(tmp_path, config=CaptureConfig(bundles=None), on_nonfinite="skip") as hook:
        train(hook, [model], inputs(2))
    train(None, [without], [batch for step, batch in enumerate(inputs(2)) if step != 2])
    for name, buffer in model.named_buffers():
        if "tracked" not in name:
            assert torch.equal(buffer, without.get_buffer(name))
    assert hook.health["counts"]["restored_buffers"] == 2


@pytest.mark.ci
def test_those_of_every_watched_model_are_restored(tmp_path: Path) -> None:
    models = [network(), network()]
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        train(hook, models, inputs(2))
    assert all(map(finite, models))
    assert hook.health["counts"]["restored_buffers"] == 4


def test_a_large_buffer_before_them_keeps_none_from_being_restored(tmp_path: Path) -> None:
    model = Composed(lambda module, x: module.net(x), queue=torch.zeros(5 * 2**20), net=network())
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        train(hook, [model], inputs(2))
    assert finite(model)


@pytest.mark.ci
@pytest.mark.parametrize("first", ["compile", "watch"])
def test_those_of_a_compiled_model_are_restored(tmp_path: Path, first: str) -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        train(hook, [compiled if first == "compile" else model], inputs(2), compiled)
    assert finite(model)
    assert hook.health["counts"] | {"restored_buffers": 2, "skipped_updates": 1} == hook.health["counts"]


@pytest.mark.parametrize("policy", ["stop", "skip:1"])
def test_they_are_restored_before_training_stops(tmp_path: Path, policy: str) -> None:
    model = network()
    batches = inputs(2)
    batches[3][0] = math.nan
    hook = Hook(tmp_path, on_nonfinite=policy)
    with pytest.raises(StopTraining):
        train(hook, [model], batches)
    hook.close()
    assert finite(model)


def test_a_mask_with_negative_infinity_stays(tmp_path: Path) -> None:
    def forward(module: Any, x: torch.Tensor) -> Any:
        module.mask.copy_(torch.full((4, 4), -math.inf).triu(1))
        return torch.softmax(module.net(x) + module.mask, -1)

    model = Composed(forward, net=torch.nn.Linear(4, 4))
    model.register_buffer("mask", torch.zeros(4, 4), persistent=False)
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        train(hook, [model], inputs(0, steps=1))
    assert torch.equal(model.get_buffer("mask"), torch.full((4, 4), -math.inf).triu(1))
    assert hook.health["counts"]["skipped_updates"] == 1
    assert "buffers" not in hook.health["notes"]


@pytest.mark.ci
def test_other_buffers_that_become_nan_are_reported(tmp_path: Path) -> None:
    def forward(module: Any, x: torch.Tensor) -> Any:
        module.memory.copy_(x.mean(0))
        return module.net(x)

    model = Composed(forward, net=torch.nn.Linear(4, 4), memory=torch.zeros(4))
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        train(hook, [model], inputs(1))
    assert hook.health["notes"]["buffers"].endswith("without a finite copy: memory")


def test_the_copies_are_those_of_the_last_beginning(tmp_path: Path) -> None:
    """The program drops the gradients of one pass, and begins anew without an update."""

    def run(hook: Hook | None, skips: bool) -> torch.Tensor:
        model, optimizer = with_sgd(network())
        if hook is not None:
            hook.watch(model, optimizer)
        for step, batch in enumerate(inputs(2)):
            if skips and step == 2:
                continue
            model(batch).square().mean().backward()
            if step != 1:
                optimizer.step()
            optimizer.zero_grad()
        mean: Any = model[0].running_mean
        return mean  # type: ignore[no-any-return]

    with Hook(tmp_path, on_nonfinite="skip") as hook:
        assert torch.equal(run(hook, skips=False), run(None, skips=True))


@pytest.mark.parametrize("first_is_bad", [True, False])
def test_of_two_passes_for_a_loss_either_may_be_bad(tmp_path: Path, first_is_bad: bool) -> None:

    model, optimizer = with_sgd(network())
    good, bad = inputs(1, steps=2)
    with skipping(tmp_path, model, optimizer) as hook:
        for pair in ((good, good), (bad, good) if first_is_bad else (good, bad), (good, good)):
            optimizer.zero_grad()
            sum(model(batch).square().mean() for batch in pair).backward()
            optimizer.step()
    assert finite(model)
    assert hook.health["counts"]["skipped_updates"] == 1
