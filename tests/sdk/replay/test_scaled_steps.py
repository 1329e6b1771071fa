"""Bundles and replays of steps under a gradient scaler: the step that fails is bundled, not the one after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from watchstep import Hook
from watchstep.format.bundle import Bundle, bundle_keys, open_bundle
from watchstep.store.store import Store

BAD = 3
KINDS = ["plain", "unscale", "fused", "fused_unscale", "two"]


@pytest.fixture(autouse=True)
def _same_flags() -> Iterator[None]:
    """Restore the flags of PyTorch that a replay sets."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def network() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def loss_of(model: Any, batch: Any) -> Any:
    return (model(batch[0]) - batch[1].log()).square().mean()


def optimizers_of(model: Any, kind: str) -> list[Any]:
    import torch

    fused = kind.startswith("fused")
    parts = [model[0], model[2]] if kind == "two" else [model]
    return [torch.optim.AdamW(part.parameters(), fused=fused) for part in parts]


def recorded(folder: Path, kind: str, *, requested: int = -1, bad: tuple[int, ...] = ()) -> list[Bundle]:
    """Train eight steps under a gradient scaler. Returns the bundles in the order of their steps."""
    import torch

    model = network()
    optimizers = optimizers_of(model, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with Hook(folder) as hook:
        hook.watch(model, optimizers[0])
        for step in range(8):
            batch = [torch.randn(8, 4), torch.rand(8, 1) + 0.5]
            if step in bad:
                batch[1][3] = 0.0
            if step == requested:
                hook.bundle()
            hook.batch(batch)
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            if "unscale" in kind:
                scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert hook.health["faults"] == {}
    store = Store.open(hook.run_url)
    return [open_bundle(store, key.path) for key in bundle_keys(store)]


def replayed(bundle: Bundle, kind: str) -> tuple[Any, str]:
    from watchstep import ReplayStep
    from watchstep.replay import render_replay, replay

    optimizer = None if kind == "two" else lambda model: optimizers_of(model, kind)[0]
    result = replay(bundle, ReplayStep(network(), loss_of, optimizer=optimizer))
    return result, render_replay(result)


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_whose_update_a_scaler_skips_for_a_bad_loss_is_bundled(tmp_path: Path, kind: str) -> None:
    (bundle,) = recorded(tmp_path, kind, bad=(BAD,))
    assert (bundle.document.step, bundle.document.reason) == (BAD, "gate")
    result, text = replayed(bundle, kind)
    assert result.was_nonfinite
    assert result.is_reproduced
    assert "first bad operation: aten.log.default" in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_step_under_a_scaler_replays_bit_for_bit(tmp_path: Path, kind: str) -> None:
    (bundle,) = recorded(tmp_path, kind, requested=2)
    result, text = replayed(bundle, kind)
    assert result.is_exact, text
    assert result.update_is_nonfinite is (None if kind == "two" else False)


def test_each_of_two_series_under_a_scaler_is_bundled_at_its_first_step(tmp_path: Path) -> None:
    bundles = recorded(tmp_path, "plain", bad=(1, 2, 5, 7))
    assert [(bundle.document.step, bundle.document.reason) for bundle in bundles] == [
        (1, "gate"),
        (5, "gate"),
    ]


def test_overflows_that_the_scaler_causes_are_not_bundled(tmp_path: Path) -> None:
    import torch

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with Hook(tmp_path) as hook:
        hook.watch(model, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(100 * loss_of(model, [torch.ones(2, 4), torch.ones(2, 1)])).backward()
            scaler.step(optimizer)
            scaler.update()
    assert list(bundle_keys(Store.open(hook.run_url))) == []
