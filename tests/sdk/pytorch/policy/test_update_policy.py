"""The gate policy: a non-finite update is never applied under ``skip`` and ``stop``, and everything else is as without it."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.training import skipping, with_sgd
from watchstep import Hook, StopTraining, open_run
from watchstep.errors import ConfigError
from watchstep.stopping import OnNonfinite

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adagrad": {},
    "Adadelta": {},
    "Adafactor": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "Rprop": {},
}
VARIANTS = list(OPTIMIZERS.items())
VARIANTS += [("AdamW", {"foreach": True}), ("AdamW", {"fused": True}), ("SGD", {"fused": True, "lr": 0.1})]


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def batches(bad: set[int], steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(3, 4, generator=generator) for _ in range(steps)]
    for step in bad:
        drawn[step][0, 0] = math.nan if step % 2 else math.inf
    return drawn


def train(
    make: Callable[[Any], torch.optim.Optimizer],
    inputs: list[torch.Tensor],
    *,
    skips: bool = False,
    hook: Hook | None = None,
    closure: bool = False,
) -> dict[str, Any]:
    """Train; ``skips``: the program itself leaves out the updates of batches that are not finite. Returns all of its state."""
    model = network()
    optimizer = make(model.parameters())
    if hook is not None:
        hook.watch(model, optimizer)
    for x in inputs:

        def loss(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = model(x).pow(2).mean()
            value.backward()
            return value

        if closure:
            optimizer.step(loss)  # type: ignore[arg-type]
            continue
        loss()
        if not skips or all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
            optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def bad_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.full((1, 4), math.nan)).sum().backward()
    optimizer.step()


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


class _Optimizer:
    """An optimizer of the program: `of` makes one with the update of the class."""

    def update(self, parameter: Any, state: dict[str, Any]) -> None:
        raise NotImplementedError

    @classmethod
    def of(cls, parameters: Any) -> Any:
        rule = cls()

        class Made(torch.optim.Optimizer):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                with torch.no_grad():
                    for group in self.param_groups:
                        for parameter in group["params"]:
                            rule.update(parameter, self.state[parameter])

        return Made(parameters, {"lr": 0.1})


@pytest.mark.ci
@pytest.mark.parametrize(("name", "arguments"), VARIANTS)
def test_a_skipped_update_changes_neither_the_model_nor_the_optimizer(
    tmp_path: Path, name: str, arguments: dict[str, Any]
) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"PyTorch {torch.__version__} has no {name}")

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **arguments)
        return optimizer

    inputs = batches({2, 3, 6}, 8)
    with Hook(tmp_path, run="r", on_nonfinite="skip") as hook:
        state = train(make, inputs, hook=hook)
    assert equal(state, train(make, inputs, skips=True))
    assert hook.health["counts"]["skipped_updates"] == 3
    assert hook.health["faults"] == {}
    run = open_run(hook.run_url)
    rows = run.tensor("updates:skipped").statistics().to_pylist()
    assert [(row["step"], row["mean"]) for row in rows] == [(2, 1), (3, 1), (4, 0), (6, 1), (7, 0)]
    assert run.steps() == list(range(8))  # a skipped step is a step of the run


@pytest.mark.ci
def test_the_first_gradients_of_a_closure_decide(tmp_path: Path) -> None:
    inputs = batches({1, 4}, 6)
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        state = train(lambda p: torch.optim.LBFGS(p, max_iter=2), inputs, hook=hook, closure=True)
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    assert hook.health["counts"]["skipped_updates"] == 2


@pytest.mark.ci
@pytest.mark.parametrize(
    ("policy", "bad", "stopped_at"),
    [
        ("stop", {2, 3}, 2),
        ("skip:1", {2, 4, 6, 7}, 7),
        ("skip:2", {0, 1, 2}, 2),
        ("skip:3", {0, 1, 2}, None),
        ("skip", {0, 1, 2, 3, 4, 5, 6, 7}, None),
    ],
)
def test_training_stops_before_the_update(
    tmp_path: Path, policy: str, bad: set[int], stopped_at: int | None
) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    hook = skipping(tmp_path, model, optimizer, policy, run="r")
    stopped, reason = None, ""
    try:
        for x in batches(bad, 8):
            before = copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
    except StopTraining as stop:
        stopped = stop.step
        reason = str(stop)
    hook.close()
    assert stopped == stopped_at
    if stopped is not None:
        assert equal(model.state_dict(), before)
        assert f"the gradients of step {stopped} are not finite" in reason
    (end,) = open_run(hook.run_url).ends()
    assert end.state == ("completed" if stopped is None else "stopped")
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


@pytest.mark.ci
def test_updates_that_a_gradient_scaler_skips_are_left_to_it(tmp_path: Path) -> None:
    model, optimizer = with_sgd(network(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    with skipping(tmp_path, model, optimizer, "stop", run="r") as hook:
        for x in batches({1, 2}, 5):
            optimizer.zero_grad()
            scaler.scale(model(x).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    run = open_run(hook.run_url)
    assert run.tensor("gradient_scaler:skipped").steps() == [1, 2]
    assert "skipped_updates" not in hook.health["counts"]
    assert [end.state for end in run.ends()] == ["completed"]


@pytest.mark.parametrize("skips", [False, True])
def test_gradients_that_become_non_finite_after_a_scaler_checked_them_on_a_device_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, skips: bool
) -> None:
    import numpy as np

    from watchstep.pytorch.parameters import amp

    class Flag:
        """The flag of a scaler on a device."""

        def numbers(self) -> Any:
            return np.array([float(skips)])

    monkeypatch.setattr(amp, "scaling_of", lambda _optimizer: amp.Scaling(overflow=Flag()))  # type: ignore[arg-type]
    model, optimizer = with_sgd(network(), 0.01)
    with skipping(tmp_path, model, optimizer) as hook:
        for x in batches(set(), 3):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            for gradient in [
                parameter.grad for parameter in model.parameters() if parameter.grad is not None
            ]:
                gradient.div_(0 * gradient.norm())  # as clipping by a norm that overflows
            optimizer.step()
            assert all(parameter.isfinite().all() for parameter in model.parameters()) or skips
    assert hook.health["faults"] == {}
    assert hook.health["counts"].get("skipped_updates", 0) == (0 if skips else 3)


@pytest.mark.ci
def test_each_optimizer_is_decided_about_by_itself(tmp_path: Path) -> None:
    good, bad = network(), network()
    first = torch.optim.SGD(good.parameters(), lr=0.1)
    second = torch.optim.SGD(bad.parameters(), lr=0.1)
    start = copy.deepcopy(bad.state_dict())
    with skipping(tmp_path, good, first) as hook:
        hook.watch(bad, second)
        x = torch.ones(2, 4)
        (good(x).pow(2).mean() + bad(x * math.inf).mean()).backward()
        first.step()
        second.step()
    assert equal(bad.state_dict(), start)
    assert not equal(good.state_dict(), start)
    assert hook.health["counts"]["skipped_updates"] == 1


class Decaying(_Optimizer):
    """Changes parameters that have no gradient."""

    def update(self, parameter: Any, state: dict[str, Any]) -> None:
        parameter.mul_(0.9)


class KeepsObjects(_Optimizer):
    """Has its moments in objects of the program, and in attributes of its own."""

    def __init__(self) -> None:
        self.averages: dict[Any, Any] = {}

    def update(self, parameter: Any, state: dict[str, Any]) -> None:
        moment = state.setdefault("moment", SimpleNamespace(sum=0))
        moment.sum = moment.sum + parameter.grad
        self.averages[parameter] = self.averages.get(parameter, 0) * 0.9 + parameter.grad
        parameter.sub_(moment.sum * 0.1 + self.averages[parameter])


class NeedsGradients(_Optimizer):
    """Fails without a gradient, and clears gradients itself."""

    def update(self, parameter: Any, state: dict[str, Any]) -> None:
        state["sum"] = state.get("sum", 0) + parameter.grad
        parameter.sub_(state["sum"] * 0.1)
        parameter.grad.zero_()


@pytest.mark.ci
@pytest.mark.parametrize("kind", [Decaying, KeepsObjects, NeedsGradients])
def test_updates_of_any_optimizer_are_skipped(tmp_path: Path, kind: type[_Optimizer]) -> None:
    inputs = batches({2, 3}, 6)
    with Hook(tmp_path, on_nonfinite="skip") as hook:
        state = train(kind.of, inputs, hook=hook)
    expected = train(kind.of, [x for step, x in enumerate(inputs) if step not in {2, 3}])
    assert equal(state["model"], expected["model"])
    assert hook.health["counts"]["skipped_updates"] == 2
    assert hook.health["faults"] == {}


@pytest.mark.parametrize("where", ["before", "after"])
def test_hooks_of_the_program_see_its_gradients_and_may_change_them(tmp_path: Path, where: str) -> None:
    model, optimizer = with_sgd(network())
    weights = list(model.parameters())
    norms: list[float] = []

    def divide(*_: Any) -> None:
        norms.append(float(weights[0].grad.norm()))  # type: ignore[union-attr]
        if where == "before":
            for parameter in weights:
                parameter.grad.div_(torch.zeros(())) if len(norms) == 2 else None  # type: ignore[union-attr]

    register = optimizer.register_step_pre_hook if where == "before" else optimizer.register_step_post_hook
    register(divide)
    with skipping(tmp_path, model, optimizer) as hook:
        for number in range(4):
            optimizer.zero_grad()
            x = torch.ones(2, 4) * (math.nan if where == "after" and number == 1 else 1.0)
            model(x).sum().backward()
            optimizer.step()
    assert all(parameter.isfinite().all() for parameter in weights)
    assert len(norms) == 4
    assert hook.health["counts"]["skipped_updates"] == 1
    assert hook.health["faults"] == {}


@pytest.mark.ci
def test_an_optimizer_that_changes_parameters_before_its_closure_ends_is_reported(tmp_path: Path) -> None:
    class Perturbing(torch.optim.SGD):  # as sharpness-aware minimization
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.add_(0.1)
            closure()
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.sub_(0.1)

    model = network()
    optimizer = Perturbing(model.parameters(), lr=0.1)
    start = copy.deepcopy(model.state_dict())
    with skipping(tmp_path, model, optimizer) as hook:

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(torch.full((1, 4), math.nan)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert all(torch.allclose(model.state_dict()[name], tensor) for name, tensor in start.items())
    assert "Perturbing changes parameters before its closure ends" in hook.health["notes"]["updates"]


@pytest.mark.ci
def test_gradients_that_change_before_a_retry_are_checked_again(tmp_path: Path) -> None:
    class Failing(torch.optim.SGD):
        failures = 1

        def step(self, closure: Any = None) -> Any:
            if self.failures:
                self.failures -= 1
                raise RuntimeError("once")
            return super().step(closure)

    model = network()
    optimizer = Failing(model.parameters(), lr=0.1)
    with skipping(tmp_path, model, optimizer):
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(RuntimeError, match="once"):
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad.fill_(math.inf)  # type: ignore[union-attr]
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.ci
def test_an_optimizer_of_copies_of_the_weights_is_decided_about_too(tmp_path: Path) -> None:
    model = network()
    masters = [torch.nn.Parameter(parameter.detach().double()) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    with skipping(tmp_path, model, optimizer):
        model(torch.full((1, 4), math.nan)).sum().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.double()  # type: ignore[union-attr]
        optimizer.step()
    assert all(master.isfinite().all() for master in masters)


@pytest.mark.ci
def test_a_skipped_step_that_raises_is_retried_with_the_same_decision(tmp_path: Path) -> None:
    def fail_once(*_: Any) -> None:
        if not failures:
            failures.append(1)
            raise RuntimeError("once")

    failures: list[int] = []
    model, optimizer = with_sgd(network())
    optimizer.register_step_post_hook(fail_once)
    start = copy.deepcopy(model.state_dict())
    with skipping(tmp_path, model, optimizer, "skip:1") as hook:
        model(torch.full((1, 4), math.nan)).sum().backward()
        with pytest.raises(RuntimeError, match="once"):
            optimizer.step()
        optimizer.step()
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert equal(model.state_dict(), start)
    assert hook.health["counts"]["skipped_updates"] == 1


@pytest.mark.ci
def test_a_model_that_is_collected_during_a_step_keeps_no_policy_from_deciding(tmp_path: Path) -> None:
    from watchstep.pytorch.parameters import optimizer_steps

    class Collects:
        def before_step(self, optimizer: Any, *, has_closure: bool, is_retry: bool) -> None:
            others.clear()
            gc.collect()

        def closure_done(self, optimizer: Any) -> None:
            pass

        def after_step(self, optimizer: Any, *, has_closure: bool) -> None:
            pass

        def failed(self, error: Exception) -> None:
            raise error

    others = [network() for _ in range(3)]
    collects = Collects()
    hooks = [Hook(tmp_path, on_nonfinite="skip") for _ in others]
    for hook, other in zip(hooks, others, strict=True):
        hook.watch(other)
    del other, hook
    for each in hooks:
        each.close()
    optimizer_steps.listen(collects)
    model, optimizer = with_sgd(network())
    with skipping(tmp_path, model, optimizer):
        bad_step(model, optimizer)
    optimizer_steps.forget(collects)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.ci
def test_a_fault_of_another_listener_keeps_no_policy_from_deciding(tmp_path: Path) -> None:
    from watchstep.pytorch.parameters import optimizer_steps

    class Fails:
        faults = 0

        def before_step(self, optimizer: Any, *, has_closure: bool, is_retry: bool) -> None:
            raise OSError("fault")

        closure_done = after_step = before_step

        def failed(self, error: Exception) -> None:
            self.faults += 1

    fails = Fails()
    optimizer_steps.listen(fails)  # type: ignore[arg-type]
    model, optimizer = with_sgd(network())
    with skipping(tmp_path, model, optimizer):
        bad_step(model, optimizer)
    optimizer_steps.forget(fails)  # type: ignore[arg-type]
    assert fails.faults
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_after_close_updates_are_the_program_s(tmp_path: Path) -> None:
    model, optimizer = with_sgd(network())
    hook = skipping(tmp_path, model, optimizer)
    hook.close()
    bad_step(model, optimizer)
    assert not any(parameter.isfinite().all() for parameter in list(model.parameters())[:2])


@pytest.mark.ci
def test_the_environment_sets_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_NONFINITE", "skip:7")
    inputs = batches({1}, 3)
    with Hook(tmp_path) as hook:
        train(lambda p: torch.optim.SGD(p, lr=0.1), inputs, hook=hook)
    assert hook.health["counts"]["skipped_updates"] == 1
    monkeypatch.setenv("WATCHSTEP_ON_NONFINITE", "ignore")
    with pytest.raises(ConfigError, match="WATCHSTEP_ON_NONFINITE='ignore'"):
        Hook(tmp_path)


@pytest.mark.parametrize("text", ["", "skip:0", "skip:-1", "skip:x", "SKIP", "stop:2", "skip: 2", "skip:2\n"])
def test_other_forms_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="on_nonfinite"):
        Hook(tmp_path, on_nonfinite=text)


@given(st.none() | st.integers(1, 10**9 - 1))
def test_a_policy_is_read_from_its_text(max_skips: int | None) -> None:
    policy = OnNonfinite("skip", max_skips)
    assert OnNonfinite.parse(str(policy)) == policy
