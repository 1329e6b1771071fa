"""Which updates are steps, and what is recorded of them, in programs with several optimizers or none."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.sdk.training import (
    EVERY_STEP,
    Training,
    batches,
    closure_of,
    recorded,
    small_model,
    wait_until_there,
    watched_training,
    with_sgd,
)
from watchstep import Bounds, CaptureConfig, Hook, Run

WEIGHT, ELEMENTS = "0.weight", 16 * 8


def test_a_new_optimizer_takes_the_place_of_one_that_is_gone(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)
    training.run(3)
    old = weakref.ref(training.optimizer)
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    gc.collect()
    assert old() is None
    training.run(4)
    run = recorded(hook)
    assert run.tensor("loss").steps() == list(range(7))
    assert run.tensor(f"{WEIGHT}:gradient").steps() == list(range(7))


@pytest.mark.parametrize(("first", "shares", "before"), [(3, True, 3), (3, False, 200), (12, False, 20)])
def test_an_optimizer_that_continues_alone_counts_after_a_while(
    tmp_path: Path, first: int, shares: bool, before: int
) -> None:
    hook, training = watched_training(tmp_path)
    training.run(first)
    _reference, rest = training.optimizer, training.model if shares else nn.Linear(2, 2)
    if not shares:
        training.model.add_module("extra", rest)
    training.optimizer = torch.optim.SGD(rest.parameters(), lr=0.0)
    training.run(before + 5)
    assert recorded(hook).steps()[-1] == first + 5


def test_a_critic_that_steps_as_often_as_ever_does_not_count(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)
    training.model.add_module("extra", critic := nn.Linear(2, 2))
    generator, other = training.optimizer, torch.optim.SGD(critic.parameters(), lr=0.0)
    for _ in range(12):
        for optimizer, steps in ((other, 25), (generator, 1)):
            training.optimizer = optimizer
            training.run(steps)
    assert recorded(hook).steps()[-1] == 12 - 1


def test_a_bad_update_by_an_optimizer_that_does_not_count_is_passed_on_at_once(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)
    training.run(12)
    _reference, head = training.optimizer, nn.Linear(2, 2)
    training.model.add_module("head", head)
    training.optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    x, _ = batches(1)[0]
    (training.model(x).sum() * math.nan).backward()
    training.optimizer.step()
    run = wait_until_there(hook)
    assert run.wait_for_steps([12], timeout=60) == [12]
    assert run.tensor("head.weight:gradient").statistics()["nan"].to_pylist() == [4]
    hook.close()


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer inside its own step, as wrappers do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        with torch.no_grad():
            for group in self.inner.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)


class SharpnessAware(Lookahead):
    """Asks for gradients anew at other weights, and then steps another optimizer."""

    def step(self, closure: Any = None) -> Any:
        closure()
        self.inner.step()


def inside(wrapper: type[Lookahead], named: str, hook: Hook) -> None:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = wrapper(inner)
    hook.watch(model, {"outer": outer, "inner": inner, "none": None}[named])
    for x, y in batches(4):
        closure = closure_of(model, outer, x, y)
        closure()
        outer.step(closure)


def critic(hook: Hook) -> None:
    model, generator = small_model(), nn.Linear(2, 2)
    first, second = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (generator, model))
    hook.watch(generator, first, name="generator")
    hook.watch(model, second, name="")
    for x, y in batches(4):
        for _ in range(5):
            second.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            second.step()
        generator(model(x).detach()).sum().backward()
        first.step()


def by_hand(hook: Hook) -> None:
    training = Training()
    hook.watch(training.model, training.optimizer)
    hook.step()
    training.run(12, lambda step, _: hook.step() if step % 3 == 2 else None)


PROGRAMS: dict[str, Callable[[Hook], None]] = {"critic": critic, "by hand": by_hand}
for _wrapper, _named in itertools.product((Lookahead, SharpnessAware), ("outer", "inner", "none")):
    PROGRAMS[f"{_wrapper.__name__}-{_named}"] = functools.partial(inside, _wrapper, _named)


@pytest.mark.parametrize("name", PROGRAMS)
def test_of_several_updates_in_a_step_the_first_is_recorded(tmp_path: Path, name: str) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    PROGRAMS[name](hook)
    run = recorded(hook)
    for tensor in (WEIGHT, f"{WEIGHT}:gradient", f"{WEIGHT}:update"):
        counts = run.tensor(tensor).statistics()["count"].to_pylist()
        assert counts == [ELEMENTS] * 4, tensor


def test_a_bad_gradient_of_a_later_update_is_recorded(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    model, optimizer = with_sgd(small_model(), 0.0)
    hook.watch(model, optimizer)
    hook.step()
    for bad in (False, True):
        model(torch.ones(2, 8)).sum().backward()
        if bad:
            optimizer.param_groups[0]["params"][0].grad[0, 0] = torch.nan
        optimizer.step()
    run: Run = recorded(hook)
    assert run.tensor(f"{WEIGHT}:gradient").statistics()["nan"].to_pylist() == [1]


def train_by_hand(model: nn.Module, passes: int) -> None:
    for x, y in batches(passes):
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None


@pytest.mark.ci
def test_updates_that_no_optimizer_makes_are_reported_as_not_seen(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    model = small_model()
    hook.watch(model)
    train_by_hand(model, 510)
    assert "hook.step()" in hook.health["notes"]["steps"]
    hook.close()


def test_a_step_that_never_ends_takes_bounded_memory(tmp_path: Path) -> None:
    config = CaptureConfig(overhead_budget=None, bounds=Bounds(queue_bytes=200_000))
    hook = Hook(tmp_path, config=config)
    model = small_model()
    hook.watch(model)
    train_by_hand(model, 100)
    run = recorded(hook)
    assert run.tensor("loss").steps() == [0]
    assert 0 < run.tensor("0:output").statistics()["count"].to_pylist()[0] < 100 * 32 * 16
    assert hook.health["counts"]["dropped_rows"] > 0
