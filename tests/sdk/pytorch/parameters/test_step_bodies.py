"""Gates before the bodies of optimizer steps: they exist only under a gate policy, and everything that refers to a step works with them."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from watchstep import Hook


def body_of(optimizer: Any) -> Any:
    """What PyTorch's wrapper of the step of an optimizer calls."""
    wrapper = type(optimizer).step
    return wrapper.__closure__[wrapper.__code__.co_freevars.index("func")].cell_contents


def step(model: Any, optimizer: Any, value: float = 1.0) -> None:
    import torch

    optimizer.zero_grad()
    model(torch.full((2, 4), value)).square().mean().backward()
    optimizer.step()


def test_without_a_policy_steps_are_pytorch_s_own(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.RAdam(model.parameters())
    body = body_of(optimizer)
    with Hook(tmp_path) as hook:
        hook.watch(model, optimizer)
        step(model, optimizer)
        assert body_of(optimizer) is body
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        hook.watch(model, optimizer)
        step(model, optimizer)
        assert body_of(optimizer) is not body
        assert pickle.loads(pickle.dumps(optimizer)).state_dict().keys() == optimizer.state_dict().keys()
        assert copy.deepcopy(body_of(optimizer)).func is body
    assert body_of(optimizer) is body


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_a_schedule_wraps_is_gated(tmp_path: Path, when: str) -> None:
    """Also if the program has replaced the step of the class in between."""
    import torch

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = torch.nn.Linear(4, 1)
    optimizer = Own(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # refers to the step of the class
    if when == "before":
        Own.step = lambda self, closure=None: None  # type: ignore[method-assign]
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        hook.watch(model, optimizer)
        if when == "after":
            step(model, optimizer)
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step(model, optimizer, math.nan)
        step(model, optimizer)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert hook.health["counts"]["skipped_updates"] == 1
    assert hook.health["notes"].get("updates") is None


def test_a_closure_that_a_hook_has_called_decides_in_the_step(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    values = [1.0, math.nan, math.nan, 1.0]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), values.pop(0))).square().mean()
        loss.backward()
        return loss

    with Hook(tmp_path, on_nonfinite="skip") as hook:
        hook.watch(model, optimizer)
        handle = optimizer.register_step_pre_hook(lambda _optimizer, args, _kwargs: args[1]() and None)
        loss: Any = optimizer.step(closure)
        handle.remove()
        assert loss.isnan()
        assert not optimizer.state
        assert optimizer.step(closure).isnan()
        assert optimizer.step(closure).isfinite()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert hook.health["counts"]["skipped_updates"] == 2


def test_an_optimizer_around_another_shares_its_closure(tmp_path: Path) -> None:
    import torch

    class Around(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            super().__init__(base.param_groups, {})
            self.base = base

        def step(self, closure: Any = None) -> Any:
            return self.base.step(closure)

    model = torch.nn.Linear(4, 1)
    optimizer = Around(torch.optim.Adam(model.parameters()))

    values = [1.0, math.nan, 1.0]

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), values.pop(0))).square().mean()
        loss.backward()
        return float(loss.detach())

    with Hook(tmp_path, on_nonfinite="skip") as hook:
        hook.watch(model, optimizer)
        losses = [optimizer.step(closure) for _ in range(3)]
    assert [math.isnan(loss) for loss in losses] == [False, True, False]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert {int(state["step"]) for state in optimizer.base.state.values()} == {2}
    assert hook.health["faults"] == {}


def test_a_compiled_step_contains_the_body_itself(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        hook.watch(model, optimizer)
        step(model, optimizer)
        before = model.weight.detach().clone()
        torch.compile(optimizer.step, backend="aot_eager")()
        assert not torch.equal(model.weight, before)
        step(model, optimizer, math.nan)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
