"""Steps of optimizers that raise, and gates before the bodies of steps."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.sdk.training import batches, recorded, skipping, small_model, watching, with_sgd
from watchstep import CaptureConfig, Hook
from watchstep.pytorch.parameters import optimizer_steps

GRADIENT = "0.weight:gradient"


class Failing(torch.optim.SGD):
    """Its step raises at some calls: before the update, or between its class's and the inherited one."""

    def __init__(self, parameters: Any, at: tuple[int, ...] = (1,)) -> None:
        super().__init__(parameters, lr=0.1)
        self.calls, self.at = -1, at

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls in self.at:
            raise RuntimeError("out of memory")
        return super().step(closure)


class FailingInside(Failing):
    """Raises inside the inherited step, by its closure or by a gradient that does not fit."""

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls in self.at:
            torch.optim.SGD.step(self, closure=_out_of_memory)
        return torch.optim.SGD.step(self, closure)


def _out_of_memory() -> float:
    raise RuntimeError("out of memory")


def square_sums(hook: Hook, name: str = GRADIENT) -> list[float]:
    column: list[float] = recorded(hook).tensor(name).statistics()["square_sum"].to_pylist()
    return column


def gradient_of(model: nn.Module) -> float:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return gradient.double().pow(2).sum().item()


@pytest.mark.parametrize("kind", [Failing, FailingInside])
@pytest.mark.parametrize("again", ["same gradients", "changed gradients", "another batch"])
def test_the_gradients_of_the_update_that_is_made_are_recorded(
    tmp_path: Path, kind: type[Failing], again: str
) -> None:
    torch.optim.SGD(
        [nn.Parameter(torch.ones(1))], lr=0.1
    ).step()  # from now on an inherited step fires its own hooks, too
    model = small_model()
    optimizer = kind(model.parameters())
    hook = watching(tmp_path, model, optimizer)
    updates = []

    def backward(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    for x, y in batches(4):
        backward(x, y)
        try:
            optimizer.step()
        except RuntimeError:
            if again == "changed gradients":
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad = 3 * parameter.grad
            elif again == "another batch":
                backward(x.flip(1), y)
            optimizer.step()
        updates.append(gradient_of(model))
    assert square_sums(hook) == pytest.approx(updates, rel=4e-6)
    run = recorded(hook)
    assert run.steps() == [0, 1, 2, 3]
    for name in (GRADIENT, "0.weight", "0.weight:update"):
        assert run.tensor(name).statistics()["count"].to_pylist() == [16 * 8] * 4
    assert hook.health["counts"]["retried_updates"] == 1


def test_a_closure_that_raises(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    hook = watching(tmp_path, model, optimizer)
    calls, updates = [0], []
    for x, y in batches(3):
        first = [True]

        def closure(x: Tensor = x, y: Tensor = y, first: list[bool] = first) -> Tensor:
            calls[0] += 1
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if calls[0] == 3:
                raise RuntimeError("out of memory")
            if first[0]:
                first[0] = False
                updates.append(gradient_of(model))
            return loss

        try:
            optimizer.step(closure)
        except RuntimeError:
            optimizer.step(closure)
    assert square_sums(hook) == pytest.approx(updates, rel=4e-6)
    assert recorded(hook).steps() == [0, 1, 2]


def test_under_a_gradient_scaler(tmp_path: Path) -> None:
    model = small_model()
    optimizer = Failing(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    hook = watching(tmp_path, model, optimizer)
    updates = []
    for x, y in batches(3):
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        try:
            scaler.step(optimizer)
        except RuntimeError:
            scaler.step(optimizer)
        scaler.update()
        updates.append(gradient_of(model))
    assert square_sums(hook) == pytest.approx(updates, rel=4e-6)
    assert recorded(hook).steps() == [0, 1, 2]


@pytest.mark.parametrize("gives_up", [True, False])
def test_clipped_gradients_and_their_norm(tmp_path: Path, gives_up: bool) -> None:
    model = small_model()
    optimizer = Failing(model.parameters())
    hook = Hook(
        tmp_path, config=CaptureConfig(overhead_budget=None, system=None, gradients="before_clipping")
    )
    hook.watch(model, optimizer)
    updates, norms = [], []
    for x, y in batches(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        before = gradient_of(model)
        norm = clip_grad_norm_(model.parameters(), 0.01).item()
        try:
            optimizer.step()
        except RuntimeError:
            if gives_up:
                continue
            optimizer.step()
        updates.append(before)
        norms.append(norm)
    assert square_sums(hook) == pytest.approx(updates, rel=4e-6)
    run = recorded(hook)
    assert run.tensor("gradient_norm").statistics()["mean"].to_pylist() == norms
    assert [name for name in run.tensors("metrics") if "norm" in name] == ["gradient_norm"]


class Votes:
    """Listens to steps as ranks do that vote before each update."""

    def __init__(self) -> None:
        self.votes = 0

    def before_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool, is_retry: bool) -> None:
        self.votes += not is_retry

    def closure_done(self, optimizer: torch.optim.Optimizer) -> None: ...

    def failed(self, error: Exception) -> None:
        raise error

    def after_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None: ...


@pytest.mark.parametrize(("new_pass", "votes"), [(False, 4), (True, 5)])
def test_ranks_vote_once_for_the_gradients_of_a_batch(tmp_path: Path, new_pass: bool, votes: int) -> None:
    """A rank that voted again for its own retry would stay one vote ahead of the others."""
    model, voter = small_model(), Votes()
    optimizer = Failing(model.parameters())
    hook = watching(tmp_path, model, optimizer)
    optimizer_steps.listen(voter)
    for x, _ in batches(4):
        model(x).sum().backward()
        try:
            optimizer.step()
        except RuntimeError:
            if new_pass:
                model(x).sum().backward()
            optimizer.step()
    hook.close()
    optimizer_steps.forget(voter)
    assert voter.votes == votes


def body_of(optimizer: Any) -> Any:
    """What PyTorch's wrapper of the step of an optimizer calls."""
    wrapper = type(optimizer).step
    return wrapper.__closure__[wrapper.__code__.co_freevars.index("func")].cell_contents


def step(model: Any, optimizer: Any, value: float = 1.0) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 4), value)).square().mean().backward()
    optimizer.step()


def test_without_a_policy_steps_are_pytorch_s_own(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.RAdam(model.parameters())
    body = body_of(optimizer)
    with Hook(tmp_path) as hook:
        hook.watch(model, optimizer)
        step(model, optimizer)
        assert body_of(optimizer) is body
    with skipping(tmp_path, model, optimizer) as hook:
        step(model, optimizer)
        assert body_of(optimizer) is not body
        assert pickle.loads(pickle.dumps(optimizer)).state_dict().keys() == optimizer.state_dict().keys()
        assert copy.deepcopy(body_of(optimizer)).func is body
    assert body_of(optimizer) is body


@pytest.mark.ci
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_a_schedule_wraps_is_gated(tmp_path: Path, when: str) -> None:
    """Also if the program has replaced the step of the class in between."""

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = torch.nn.Linear(4, 1)
    optimizer = Own(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # refers to the step of the class
    if when == "before":
        Own.step = lambda self, closure=None: None  # type: ignore[method-assign]
    with skipping(tmp_path, model, optimizer) as hook:
        if when == "after":
            step(model, optimizer)
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step(model, optimizer, math.nan)
        step(model, optimizer)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert hook.health["counts"]["skipped_updates"] == 1
    assert hook.health["notes"].get("updates") is None


@pytest.mark.ci
def test_a_closure_that_a_hook_has_called_decides_in_the_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    values = [1.0, math.nan, math.nan, 1.0]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), values.pop(0))).square().mean()
        loss.backward()
        return loss

    with skipping(tmp_path, model, optimizer) as hook:
        handle = optimizer.register_step_pre_hook(lambda _optimizer, args, _kwargs: args[1]() and None)
        loss: Any = optimizer.step(closure)
        handle.remove()
        assert loss.isnan()
        assert not optimizer.state
        assert optimizer.step(closure).isnan()
        assert optimizer.step(closure).isfinite()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert hook.health["counts"]["skipped_updates"] == 2


@pytest.mark.ci
def test_an_optimizer_around_another_shares_its_closure(tmp_path: Path) -> None:
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

    with skipping(tmp_path, model, optimizer) as hook:
        losses = [optimizer.step(closure) for _ in range(3)]
    assert [math.isnan(loss) for loss in losses] == [False, True, False]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert {int(state["step"]) for state in optimizer.base.state.values()} == {2}
    assert hook.health["faults"] == {}


@pytest.mark.release
def test_a_compiled_step_contains_the_body_itself(tmp_path: Path) -> None:
    model, optimizer = with_sgd(torch.nn.Linear(4, 1))
    with skipping(tmp_path, model, optimizer):
        step(model, optimizer)
        before = model.weight.detach().clone()
        torch.compile(optimizer.step, backend="aot_eager")()
        assert not torch.equal(model.weight, before)
        step(model, optimizer, math.nan)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
