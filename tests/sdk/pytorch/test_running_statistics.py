"""Running statistics that a bad batch makes non-finite are restored at a skipped or stopped update, and nothing else is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from watchstep import CaptureConfig, Hook, StopTraining

if TYPE_CHECKING:
    import torch


def inputs(bad: int | None, steps: int = 5) -> list[torch.Tensor]:
    """Batches, one of them bad."""
    import torch

    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 4, generator=generator) for _ in range(steps)]
    if bad is not None:
        batches[bad][0] = math.nan
    return batches


def network() -> torch.nn.Sequential:
    """Has a normalization layer."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))


def train(hook: Hook | None, models: list[Any], batches: list[torch.Tensor], called: Any = None) -> None:
    """Train models one after another, all by one optimizer; ``called`` stands for the last."""
    import torch

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
    import torch

    model, without = network(), network()
    with Hook(tmp_path, config=CaptureConfig(bundles=None), on_nonfinite="skip") as hook:
        train(hook, [model], inputs(2))
    train(None, [without], [batch for step, batch in enumerate(inputs(2)) if step != 2])
    for name, buffer in model.named_buffers():
        if "tracked" not in name:
            assert torch.equal(buffer, without.get_buffer(name))
    assert hook.health["counts"]["restored_buffers"] == 2


def test_those_of_every_watched_model_are_restored(tmp_path: Path) -> None:
    models = [network(), network()]
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        train(hook, models, inputs(2))
    assert all(map(finite, models))
    assert hook.health["counts"]["restored_buffers"] == 4


def test_a_large_buffer_before_them_keeps_none_from_being_restored(tmp_path: Path) -> None:
    import torch

    class WithQueue(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(5 * 2**20))
            self.net = network()

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

    model = WithQueue()
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        train(hook, [model], inputs(2))
    assert finite(model)


@pytest.mark.parametrize("first", ["compile", "watch"])
def test_those_of_a_compiled_model_are_restored(tmp_path: Path, first: str) -> None:
    import torch

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
    import torch

    class Masked(torch.nn.Module):
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 4)
            self.register_buffer("mask", torch.zeros(4, 4), persistent=False)

        def forward(self, x: torch.Tensor) -> Any:
            self.mask.copy_(torch.full((4, 4), -math.inf).triu(1))
            return torch.softmax(self.net(x) + self.mask, -1)

    model = Masked()
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        train(hook, [model], inputs(0, steps=1))
    assert torch.equal(model.mask, torch.full((4, 4), -math.inf).triu(1))
    assert hook.health["counts"]["skipped_updates"] == 1
    assert "buffers" not in hook.health["notes"]


def test_other_buffers_that_become_nan_are_reported(tmp_path: Path) -> None:
    import torch

    class Remembers(torch.nn.Module):
        memory: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 4)
            self.register_buffer("memory", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> Any:
            self.memory.copy_(x.mean(0))
            return self.net(x)

    with Hook(tmp_path, on_nonfinite="skip") as hook:
        train(hook, [Remembers()], inputs(1))
    assert hook.health["notes"]["buffers"].endswith("without a finite copy: memory")


def test_the_copies_are_those_of_the_last_beginning(tmp_path: Path) -> None:
    """The program drops the gradients of one pass, and begins anew without an update."""
    import torch

    def run(hook: Hook | None, skips: bool) -> torch.Tensor:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    import torch

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    good, bad = inputs(1, steps=2)
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        hook.watch(model, optimizer)
        for pair in ((good, good), (bad, good) if first_is_bad else (good, bad), (good, good)):
            optimizer.zero_grad()
            sum(model(batch).square().mean() for batch in pair).backward()
            optimizer.step()
    assert finite(model)
    assert hook.health["counts"]["skipped_updates"] == 1
