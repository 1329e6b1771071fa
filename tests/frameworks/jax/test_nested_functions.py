"""Compiled functions that call others, or are compiled again and again, are called, traced and recorded as without a recording."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from watchstep import CaptureConfig, Hook, open_run
from watchstep.jax import Recording
from watchstep.stopping import StopTraining

EVERY_STEP = CaptureConfig(overhead_budget=None)


@pytest.fixture(params=["host", "device"])
def hook(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hook]:
    hook = Hook(tmp_path, run="r", config=EVERY_STEP)
    Recording(hook, figures=request.param)
    yield hook
    hook.close()
    assert not hook.health["faults"]


def values(hook: Hook, name: str, column: str = "mean") -> list[float]:
    hook.close()
    found: list[float] = open_run(hook.run_url).tensor(name).statistics().column(column).to_pylist()
    return found


def loss_of(weight: Any) -> Any:
    return jnp.sum(weight**2)


def updated(optimizer: Any, weight: Any, state: Any) -> Any:
    loss, gradient = jax.value_and_grad(loss_of)(weight)
    updates, state = optimizer.update(gradient, state, weight)
    return optax.apply_updates(weight, updates), state, loss


def test_an_inner_step_receives_what_jax_passes(hook: Hook) -> None:
    optimizer = optax.sgd(0.1)

    @functools.partial(jax.jit, static_argnames="count")
    def inner(batch: Any, weight: Any, state: Any, scale: Any, count: int) -> Any:
        index = jnp.argmax(weight)
        row = batch.pop("table")[index].astype(jnp.float32)  # an array of NumPy has no traced index
        for _ in range(count):
            weight, state, loss = updated(optimizer, weight, state)
        return weight + 0 * row.sum() * scale.astype(jnp.float32), state, loss, 1

    @jax.jit
    def outer(weight: Any, state: Any) -> Any:
        batch = {"table": np.ones((3, 2))}
        weight, state, loss, number = inner(batch, weight, state, 2.0, count=2)
        assert batch  # the dict of the caller is its own
        return weight, state, loss, number.astype(jnp.int32)

    weight = jnp.asarray([1.0, 2.0, 3.0])
    state = optimizer.init(weight)
    for _ in range(2):
        weight, state, _, _ = outer(weight, state)
    assert values(hook, "loss") == pytest.approx([14.0 * 0.64**step for step in range(4)])


def test_an_update_three_functions_deep_is_recorded(hook: Hook) -> None:
    optimizer = optax.sgd(0.1)

    @jax.jit
    def first(weight: Any, state: Any) -> Any:
        return updated(optimizer, weight, state)

    @jax.jit
    def second(weight: Any, state: Any) -> Any:
        return first(weight, state)

    @jax.jit
    def third(weight: Any, state: Any) -> Any:
        return second(weight, state)

    @jax.jit
    def fourth(weight: Any, state: Any) -> Any:
        return third(weight, state)

    weight = jnp.ones(2)
    state = optimizer.init(weight)
    for _ in range(3):
        weight, state, _ = fourth(weight, state)
    assert values(hook, "loss") == pytest.approx([2.0, 2 * 0.64, 2 * 0.64**2])


def test_a_function_that_is_compiled_in_a_loop_is_traced_once(hook: Hook) -> None:
    optimizer, traces = optax.sgd(0.1), []

    def step(weight: Any, state: Any) -> Any:
        traces.append(1)
        return updated(optimizer, weight, state)

    weight = jnp.ones(2)
    state = optimizer.init(weight)
    for _ in range(5):
        weight, state, _ = jax.jit(step)(weight, state)
    assert len(traces) == 1
    assert len(values(hook, "loss")) == 5


def test_a_body_of_a_training_is_used_under_vmap_and_grad(hook: Hook) -> None:
    optimizer = optax.sgd(0.1)

    def body(carry: Any, _: Any) -> Any:
        weight, state, loss = updated(optimizer, *carry)
        return (weight, state), loss

    def trained(weight: Any) -> Any:
        (weight, _), losses = jax.lax.scan(body, (weight, optimizer.init(weight)), None, length=3)
        return weight, losses

    weight, _ = jax.jit(trained)(jnp.ones(2))
    many, _ = jax.jit(jax.vmap(trained))(jnp.ones((4, 2)))
    gradient = jax.jit(jax.grad(lambda weight: trained(weight)[0].sum()))(jnp.ones(2))
    assert many.tolist() == [weight.tolist()] * 4
    assert gradient.tolist() == pytest.approx([0.8**3] * 2)
    assert values(hook, "loss") == pytest.approx([2.0, 2 * 0.64, 2 * 0.64**2])


def test_a_trace_that_fails_is_the_program_s_own(hook: Hook) -> None:
    optimizer = optax.sgd(0.1)
    step = jax.jit(functools.partial(updated, optimizer))
    weight = jnp.ones(2)
    with pytest.raises(TypeError, match="at path weight"):
        step("no array", optimizer.init(weight))
    step(weight, optimizer.init(weight))
    assert values(hook, "loss") == [2.0]


def test_a_second_model_counts_its_own_steps(hook: Hook) -> None:
    optimizer = optax.sgd(0.01)
    for size in (2, 3):
        step = jax.jit(functools.partial(updated, optimizer))
        weight = jnp.ones(size)
        state = optimizer.init(weight)
        for _ in range(30):
            weight, state, _ = step(weight, state)
    hook.close()
    run = open_run(hook.run_url)
    # The second model does not count steps at first, because critics are updated between the steps of their generator.
    assert run.tensor("parameter:gradient").steps() == list(range(30))
    assert len(run.tensor("model_2.parameter:gradient").steps()) >= 10


def test_a_loss_of_other_gradients_is_not_the_update_s(hook: Hook) -> None:
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(weight: Any, state: Any, images: Any) -> Any:
        penalty, slopes = jax.value_and_grad(lambda x: jnp.sum(x**3))(images)
        gradient = jax.grad(loss_of)(weight)
        updates, state = optimizer.update(gradient, state, weight)
        return optax.apply_updates(weight, updates), state, penalty + slopes.sum()

    weight = jnp.ones(2)
    state = optimizer.init(weight)
    for _ in range(3):
        weight, state, _ = step(weight, state, jnp.ones((4, 3)))
    hook.close()
    run = open_run(hook.run_url)
    assert run.steps() == [0, 1, 2]
    assert "loss" not in run.tensors()


def test_a_random_key_is_no_hyperparameter(hook: Hook) -> None:
    optimizer = optax.inject_hyperparams(optax.noisy_sgd)(0.1, eta=0.0, key=jax.random.key(0))
    step = jax.jit(functools.partial(updated, optimizer))
    weight = jnp.ones(2)
    state = optimizer.init(weight)
    for _ in range(3):
        weight, state, _ = step(weight, state)
    assert len(values(hook, "loss")) == 3


def poisoned(optimizer: Any, weight: Any, state: Any, factor: Any) -> Any:
    gradient = jax.grad(loss_of)(weight) * factor
    updates, state = optimizer.update(gradient, state, weight)
    return optax.apply_updates(weight, updates), state


def test_each_recording_has_its_own_policy(tmp_path: Path) -> None:
    optimizer = optax.sgd(0.1)
    step = jax.jit(functools.partial(poisoned, optimizer))

    def train(policy: str) -> Any:
        hook = Hook(tmp_path, run=policy, config=EVERY_STEP, on_nonfinite=policy)
        Recording(hook)
        other = Hook(tmp_path, run=f"{policy}-other", config=EVERY_STEP)
        Recording(other)
        other.close()  # which leaves the first one's policy
        weight = jnp.ones(2)
        state = optimizer.init(weight)
        with hook:
            for factor in (1.0, 1.0, np.nan, 1.0):
                try:
                    weight, state = step(weight, state, factor)
                except StopTraining:
                    break
        return weight

    assert np.isfinite(train("skip")).all()
    assert np.isnan(train("record")).all()
    assert np.isfinite(train("stop")).all()


def test_a_call_without_an_update_costs_few_calls_and_one_that_gets_an_update_later_is_recorded(
    hook: Hook,
) -> None:
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(weight: Any, state: Any) -> Any:
        if len(weight) == 1:
            return weight, state, loss_of(weight)
        return updated(optimizer, weight, state)

    arguments = jnp.ones(1), optimizer.init(jnp.ones(1))
    step(*arguments)
    called: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "/watchstep/jax/" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    step(*arguments)
    sys.setprofile(None)
    assert len(called) <= 6, called
    weight, state = jnp.ones(3), optimizer.init(jnp.ones(3))
    for _ in range(3):
        weight, state, _ = step(weight, state)
    assert values(hook, "loss")[-1] == pytest.approx(3 * 0.8**4)
