"""The gate policy beside hooks of the program on optimizers: they see its gradients, and the decision follows all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from watchstep import Hook, StopTraining

if TYPE_CHECKING:
    import torch


def trained(
    hooks: list[Hook], optimizer: Any, model: torch.nn.Module, steps: int = 4, bad: int | None = None
) -> None:
    """Train; the batch of one step is bad. Closes the hooks."""
    import torch

    for step in range(steps):
        optimizer.zero_grad()
        x = torch.full((2, 4), math.nan if step == bad else 1.0)
        model(x).square().mean().backward()
        optimizer.step()
    for hook in hooks:
        hook.close()
        assert hook.health["faults"] == {}


@pytest.fixture
def model() -> torch.nn.Module:
    """A small model."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


@pytest.fixture
def handles() -> Iterator[list[Any]]:
    """Handles of hooks that are removed after the test."""
    handles: list[Any] = []
    yield handles
    for handle in handles:
        handle.remove()


def test_a_hook_that_removes_itself_runs_once(tmp_path: Path, model: torch.nn.Module) -> None:
    import torch

    def once(*_: Any) -> None:
        calls.append(1)
        handle.remove()

    calls: list[int] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = optimizer.register_step_pre_hook(once)
    hook = Hook(tmp_path, on_nonfinite="skip")
    hook.watch(model, optimizer)
    trained([hook], optimizer, model, bad=2)
    assert calls == [1]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_two_recordings_decide_about_an_optimizer_with_hooks(tmp_path: Path, model: torch.nn.Module) -> None:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    hooks = [Hook(tmp_path, run=name, on_nonfinite="skip") for name in "ab"]
    for hook in hooks:
        hook.watch(model, optimizer)
    trained(hooks, optimizer, model, bad=2)
    assert [hook.health["counts"]["skipped_updates"] for hook in hooks] == [1, 1]


def test_global_hooks_see_the_gradients_of_a_skipped_update(
    tmp_path: Path, model: torch.nn.Module, handles: list[Any]
) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def note(optimizer: Any, *_: Any) -> None:
        norms.append(float(optimizer.param_groups[0]["params"][0].grad.norm()))

    norms: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = Hook(tmp_path, on_nonfinite="skip")
    hook.watch(model, optimizer)
    handles += [register_optimizer_step_pre_hook(note), register_optimizer_step_post_hook(note)]
    trained([hook], optimizer, model, bad=2)
    assert [math.isnan(norm) for norm in norms] == [False] * 4 + [True] * 2 + [False] * 2
    assert hook.health["counts"]["skipped_updates"] == 1


@pytest.mark.parametrize("policy", ["skip", "stop"])
@pytest.mark.parametrize("scope", ["global", "optimizer"])
def test_updates_by_gradients_that_a_hook_makes_finite_are_made(
    tmp_path: Path, model: torch.nn.Module, handles: list[Any], scope: str, policy: str
) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def clean(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.nan_to_num_(1.0)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = Hook(tmp_path, on_nonfinite=policy)
    hook.watch(model, optimizer)
    register = register_optimizer_step_pre_hook if scope == "global" else optimizer.register_step_pre_hook
    handles.append(register(clean))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trained([hook], optimizer, model, steps=1, bad=0)
    for parameter, weight in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, weight - 0.1)
    assert "skipped_updates" not in hook.health["counts"]


def test_a_prevented_step_leaves_nothing_for_later(tmp_path: Path, model: torch.nn.Module) -> None:
    """A step that raises after an update by finite gradients, a restored checkpoint, and the next step."""
    import torch

    class Checks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if any(not parameter.grad.isfinite().all() for parameter in self.param_groups[0]["params"]):
                raise FloatingPointError
            return result

    optimizer = Checks(model.parameters(), lr=0.1)
    hook = Hook(tmp_path, on_nonfinite="skip")
    hook.watch(model, optimizer)
    model(torch.full((2, 4), math.nan)).square().mean().backward()
    optimizer.step()  # without the update there is nothing to raise for
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer.zero_grad()
    model(torch.zeros(2, 4)).square().mean().backward()
    optimizer.step()
    hook.close()
    assert not any(parameter.any() for parameter in model.parameters())


def test_an_optimizer_that_calls_hooks_by_itself_is_stopped_but_not_skipped(
    tmp_path: Path, model: torch.nn.Module
) -> None:
    import torch
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    class Own(torch.optim.SGD):
        @staticmethod
        def profile_hook_step(step: Any) -> Any:
            def call(self: Any, *args: Any) -> Any:
                for hook in _global_optimizer_pre_hooks.values():
                    hook(self, (self, *args), {})
                return step(self, *args)

            return call

        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.data -= parameter.grad

    optimizer = Own(model.parameters(), lr=0.1)
    hook = Hook(tmp_path, run="stop", on_nonfinite="stop")
    hook.watch(model, optimizer)
    with pytest.raises(StopTraining):
        trained([hook], optimizer, model, bad=1)
    hook.close()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    hook = Hook(tmp_path, run="skip", on_nonfinite="skip")
    hook.watch(model, optimizer)
    trained([hook], optimizer, model, bad=1)
    assert "Own calls hooks by itself" in hook.health["notes"]["updates"]
    assert "skipped_updates" not in hook.health["counts"]
