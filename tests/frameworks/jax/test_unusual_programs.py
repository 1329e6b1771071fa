"""Programs that use JAX in unusual ways run as without a recording, and what is recorded of them is theirs."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.frameworks.recorded_programs import values
from watchstep import CaptureConfig, Hook, StopTraining, open_run
from watchstep.jax import Recording

BATCH = np.ones((2, 3), np.float32)


def loss_of(weight: Any, batch: Any) -> Any:
    return jnp.mean((batch @ weight) ** 2)


def stepping(optimizer: Any) -> Any:
    """A training step of one weight."""

    def step(weight: Any, state: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(weight, batch)
        updates, state = optimizer.update(gradient, state, weight)
        return optax.apply_updates(weight, updates), state, loss

    return step


@pytest.fixture
def hook(tmp_path: Path) -> Iterator[Hook]:
    hook = Hook(tmp_path, run="r", config=CaptureConfig(overhead_budget=None))
    Recording(hook)
    yield hook
    hook.close()
    assert not hook.health["faults"]


def closed(hook: Hook) -> Any:
    """The run of a hook that is closed now."""
    hook.close()
    return open_run(hook.run_url)


def test_gradients_and_weights_may_have_other_dtypes(hook: Hook) -> None:
    optimizer = optax.sgd(0.1)
    weights = {"small": jnp.ones(3, jnp.bfloat16), "large": jnp.full(2**20, 2, jnp.bfloat16)}
    state = optimizer.init(weights)

    @jax.jit
    def step(weights: Any, state: Any) -> Any:
        gradients = jax.tree.map(lambda weight: weight.astype(jnp.float32), weights)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    for _ in range(3):
        weights, state = step(weights, state)
    run = closed(hook)
    assert values(run, "large", "max")[0] == values(run, "large:gradient", "max")[0] == 2.0


def test_another_recording_of_the_same_hook_records_nothing_twice(hook: Hook) -> None:
    """As a notebook does whose cell is run again."""
    again = Recording(hook)
    optimizer = optax.sgd(0.1)
    step = jax.jit(stepping(optimizer))
    weight, state = jnp.ones((3, 4)), optimizer.init(jnp.ones((3, 4)))
    losses = []
    for _ in range(3):
        weight, state, loss = step(weight, state, BATCH)
        losses.append(float(loss))
    run = closed(hook)
    again.close()
    assert run.steps() == [0, 1, 2]
    assert values(run, "loss") == pytest.approx(losses)


def test_one_structure_in_two_dtypes_is_two_models(hook: Hook) -> None:
    optimizer = optax.sgd(0.1)
    step = jax.jit(stepping(optimizer))
    for dtype in (jnp.bfloat16, jnp.float32):
        weight = jnp.ones(3, dtype)
        state = optimizer.init(weight)
        for _ in range(3):
            weight, state, _ = step(weight, state, BATCH.astype(dtype))
    run = closed(hook)
    assert all(
        0 < value <= 18 for name in run.tensors() if name.endswith(":gradient") for value in values(run, name)
    )


@pytest.mark.parametrize("passes_weights", [True, False])
def test_two_parameter_sets_in_one_step_are_told_apart(hook: Hook, passes_weights: bool) -> None:
    optimizer = optax.sgd(0.1, momentum=None if passes_weights else 0.0)
    first, second = jnp.ones(3), jnp.full(3, 10.0)
    states = optimizer.init(first), optimizer.init(second)

    @jax.jit
    def step(first: Any, second: Any, states: Any) -> Any:
        loss_a, gradient_a = jax.value_and_grad(loss_of)(first, BATCH)
        loss_b, gradient_b = jax.value_and_grad(loss_of)(second, BATCH)
        update_a, state_a = optimizer.update(gradient_a, states[0], first if passes_weights else None)
        update_b, state_b = optimizer.update(gradient_b, states[1], second if passes_weights else None)
        return first + update_a, second + update_b, (state_a, state_b), loss_a, loss_b

    losses = []
    for _ in range(4):
        first, second, states, *both = step(first, second, states)
        losses.append([float(loss) for loss in both])
    run = closed(hook)
    assert values(run, "parameter:gradient")[0] == pytest.approx(6.0)
    assert values(run, "model_2.parameter:gradient")[0] == pytest.approx(60.0)
    assert run.tensor("model_2.parameter:gradient").steps() == [0, 1, 2, 3]
    assert values(run, "loss") == pytest.approx([a for a, _ in losses])
    assert values(run, "loss_2") == pytest.approx([b for _, b in losses])


def test_two_models_with_updates_inside_of_scans_have_losses_of_their_own(hook: Hook) -> None:
    optimizer = optax.sgd(0.01)
    one = stepping(optimizer)

    @jax.jit
    def epoch(weight: Any, state: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            after, state, loss = one(*carry, jnp.ones((2, carry[0].size)))
            return (after, state), loss

        return jax.lax.scan(body, (weight, state), None, length=3)

    carries = [(weight, optimizer.init(weight)) for weight in (jnp.ones(3), jnp.ones(4))]
    losses: list[list[float]] = [[], []]
    for _ in range(3):
        for number, carry in enumerate(carries):
            carries[number], found = epoch(*carry)
            losses[number] += found.tolist()
    run = closed(hook)
    assert values(run, "loss") == pytest.approx(losses[0])
    assert all(min(losses[1]) - 1e-6 <= value <= max(losses[1]) for value in values(run, "loss_2"))


@pytest.mark.parametrize("rows", [(3, 4), (3, 3)])
@pytest.mark.parametrize("is_scan", [False, True])
def test_updates_of_two_models_in_one_dispatch_belong_to_the_same_steps(
    is_scan: bool, rows: tuple[int, int], tmp_path: Path
) -> None:
    """On accelerators, updates of compiled steps are in rings, as those of scans are."""
    hook = Hook(tmp_path, run="r", config=CaptureConfig(overhead_budget=None))
    Recording(hook, figures="device")
    optimizer = optax.sgd(0.01)
    one = stepping(optimizer)

    def both(carry: Any, _: Any) -> Any:
        made = [one(weight, state, jnp.ones((2, weight.size))) for weight, state in carry]
        return tuple((weight, state) for weight, state, _ in made), jnp.stack([loss for _, _, loss in made])

    step = jax.jit(both) if not is_scan else jax.jit(lambda carry, _: jax.lax.scan(both, carry, None, 3))
    weights = jnp.ones(rows[0]), jnp.full(rows[1], 10.0)
    carry = tuple((weight, optimizer.init(weight)) for weight in weights)
    losses = []
    for _ in range(6):
        carry, found = step(carry, 0)
        losses += np.asarray(found).reshape(-1, 2).tolist()
    run = closed(hook)
    assert not hook.health["faults"]
    assert run.steps() == list(range(len(losses)))
    assert values(run, "loss") == pytest.approx([first for first, _ in losses])
    assert values(run, "loss_2") == pytest.approx([second for _, second in losses])


def twins(carry: Any, optimizer: Any, times: int = 1) -> tuple[Any, Any]:
    """Twin critics of one structure, each updated so often in an iteration. The program passes no weights to the optimizer."""
    after, losses = [], []
    for each in carry:
        weight, state = each
        for _ in range(times):
            loss, gradient = jax.value_and_grad(loss_of)(weight, BATCH)
            update, state = optimizer.update(gradient, state)
            weight += update
            losses.append(loss)
        after.append((weight, state))
    return tuple(after), jnp.stack(losses)


@pytest.mark.parametrize("times", [1, 2])
def test_models_of_one_structure_in_a_scan_are_told_apart_by_their_states(hook: Hook, times: int) -> None:
    optimizer = optax.adam(0.01)
    weights = jnp.ones(3), jnp.full(3, 10.0)
    carry = tuple((weight, optimizer.init(weight)) for weight in weights)
    epoch = jax.jit(
        lambda carry: jax.lax.scan(lambda carry, _: twins(carry, optimizer, times), carry, None, 3)
    )
    losses = []
    for _ in range(3):
        carry, found = epoch(carry)
        losses += np.asarray(found).reshape(-1, 2, times).tolist()
    run = closed(hook)
    assert values(run, "loss") == pytest.approx([loss for first, _ in losses for loss in first])
    seconds = [loss for _, second in losses for loss in second]
    assert values(run, "loss_2") == pytest.approx(seconds)
    gradients = values(run, "model_2.parameter:gradient")
    assert gradients
    assert all(50 < gradient < 61 for gradient in gradients)


def test_a_compiled_epoch_that_another_function_calls_is_recorded(hook: Hook) -> None:
    """Its body persists, so that JAX uses the trace by which updates were looked for."""
    optimizer = optax.sgd(0.01)
    one = stepping(optimizer)

    def body(carry: Any, batch: Any) -> Any:
        after, state, loss = one(*carry, batch)
        return (after, state), loss

    epoch = jax.jit(lambda carry, batches: jax.lax.scan(body, carry, batches))

    @jax.jit
    def whole(carry: Any, batches: Any) -> Any:
        return epoch(carry, batches)

    carry, losses = (jnp.ones(3), optimizer.init(jnp.ones(3))), []
    for _ in range(2):
        carry, found = whole(carry, jnp.ones((3, 2, 3)))
        losses += found.tolist()
    assert values(closed(hook), "loss") == pytest.approx(losses)


@pytest.mark.parametrize("figures", ["host", "device"])
def test_a_loss_that_overflows_stops_nothing_if_its_gradients_are_finite(
    figures: Literal["host", "device"], tmp_path: Path
) -> None:
    hook = Hook(tmp_path, run="r", on_nonfinite="stop")
    Recording(hook, figures=figures)
    optimizer = optax.sgd(0.01)

    @jax.jit
    def step(weight: Any, state: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda weight: jnp.sum(weight) + jnp.inf)(weight)
        updates, state = optimizer.update(gradient, state, weight)
        return optax.apply_updates(weight, updates), state, loss

    weight, state = jnp.ones(3), optimizer.init(jnp.ones(3))
    for _ in range(4):
        weight, state, _ = step(weight, state)
    run = closed(hook)
    assert run.steps() == [0, 1, 2, 3]
    assert hook.stopped is None


def test_nan_in_the_last_of_many_models_stops(tmp_path: Path) -> None:
    hook = Hook(tmp_path, run="r", on_nonfinite="stop")
    Recording(hook)
    optimizer = optax.sgd(0.01)
    step = jax.jit(stepping(optimizer))
    carries = [(jnp.ones(width), optimizer.init(jnp.ones(width))) for width in range(1, 12)]

    def train() -> None:
        for turn in range(4):
            for number, (weight, state) in enumerate(carries):
                is_bad = turn == 2 and number == len(carries) - 1
                batch = jnp.full((2, weight.size), jnp.nan if is_bad else 1.0)
                carries[number] = step(weight, state, batch)[:2]

    with pytest.raises(StopTraining):
        train()
    hook.close()


def test_updates_of_several_models_of_which_one_is_large_are_of_the_same_steps(tmp_path: Path) -> None:
    """Rows of many tensors arrive a dispatch later than those of one."""
    hook = Hook(tmp_path, run="r")
    Recording(hook)
    optimizer = optax.sgd(0.01)

    def loss_of_many(weights: Any) -> Any:
        return sum(jnp.sum(weight**2) for weight in weights)

    def body(carry: Any, _: Any) -> Any:
        after, losses = [], []
        for weights, state in carry:
            loss, gradient = jax.value_and_grad(loss_of_many)(weights)
            updates, state_after = optimizer.update(gradient, state, weights)
            after.append((optax.apply_updates(weights, updates), state_after))
            losses.append(loss)
        return tuple(after), jnp.stack(losses)

    epoch = jax.jit(lambda carry: jax.lax.scan(body, carry, None, 5))
    models = [jnp.ones(2)] * 80, [jnp.full(3, 7.0)]
    carry, losses = tuple((weights, optimizer.init(weights)) for weights in models), []
    for _ in range(6):
        carry, found = epoch(carry)
        losses += found.tolist()
    run = closed(hook)
    assert run.steps() == list(range(30))
    assert values(run, "loss") == pytest.approx([first for first, _ in losses])
    assert values(run, "loss_2") == pytest.approx([second for _, second in losses])


def test_a_policy_changes_nothing_where_updates_are_not_observed(tmp_path: Path) -> None:
    optimizer = optax.sgd(0.01)
    weights, batches = jnp.ones((2, 3)), jnp.ones((2, 2, 3)).at[1].set(jnp.nan)

    def trained() -> Any:
        step = jax.jit(jax.vmap(stepping(optimizer)))
        return np.asarray(step(weights, jax.vmap(optimizer.init)(weights), batches)[0])

    plain = trained()
    with Hook(tmp_path, run="r", on_nonfinite="stop") as hook:
        Recording(hook)
        optimizer = optax.sgd(0.01)
        np.testing.assert_array_equal(trained(), plain)
    assert "vmap" in hook.health["notes"]["jax"]


def in_parts(name: str) -> tuple[Any, Any]:
    """The state and the update of an optimizer that a program composes itself."""
    clip, adam, decay, rate = (
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1),
        optax.inject_hyperparams(optax.scale)(step_size=-0.1),
    )
    several = optax.MultiSteps(optax.adam(0.1), 2)
    ema = optax.ema(0.9)

    def clipped(gradient: Any, states: Any, weight: Any) -> Any:
        gradient, _ = clip.update(gradient, optax.EmptyState())
        update, state = adam.update(gradient, states[0], weight)
        update, _ = decay.update(update, optax.EmptyState(), weight)
        update, last = rate.update(update, states[1])
        return update, (state, last)

    def averaged(gradient: Any, states: Any, weight: Any) -> Any:
        _, average = ema.update(weight, states[1])
        update, state = adam.update(gradient, states[0], weight)
        return -0.1 * update, (state, average)

    def accumulated(gradient: Any, states: Any, weight: Any) -> Any:
        gradient, _ = clip.update(gradient, optax.EmptyState())
        update, state = several.update(gradient, states[0], weight)
        return update, (state, states[1])

    identity = optax.identity()

    def unclipped(gradient: Any, states: Any, weight: Any) -> Any:
        gradient, _ = identity.update(gradient, optax.EmptyState())
        update, state = adam.update(gradient, states[0], weight)
        return -0.1 * update, (state, states[1])

    def limited(gradient: Any, states: Any, weight: Any) -> Any:
        gradient, _ = clip.update(gradient, optax.EmptyState())
        norm = jnp.linalg.norm(gradient)
        gradient = jnp.clip(gradient, -0.5, 0.5) / jnp.maximum(norm, 1.0)
        update, state = adam.update(gradient, states[0], weight)
        return -0.1 * update, (state, states[1])

    def divided(gradient: Any, states: Any, weight: Any) -> Any:
        first, state = adam.update(gradient, states[0], weight)
        second, last = rate.update(gradient, states[1], weight)
        return jnp.where(jnp.arange(3) < 1, -0.1 * first, second), (state, last)

    weight = jnp.ones(3)
    parts = {
        "clipped": ((adam.init(weight), rate.init(weight)), clipped),
        "averaged": ((adam.init(weight), ema.init(weight)), averaged),
        "accumulated": ((several.init(weight), ()), accumulated),
        "unclipped": ((adam.init(weight), ()), unclipped),
        "limited": ((adam.init(weight), ()), limited),
        "divided": ((adam.init(weight), rate.init(weight)), divided),
    }
    return parts[name]


@pytest.mark.parametrize(
    ("name", "is_compiled"),
    [
        *itertools.product(["clipped", "averaged", "accumulated", "unclipped", "divided"], [True, False]),
        ("limited", True),  # outside of traces, nothing tells what gradients were computed from
    ],
)
def test_transformations_that_a_program_applies_one_by_one_are_one_update(
    name: str, is_compiled: bool, hook: Hook
) -> None:
    state, update = in_parts(name)

    def step(weight: Any, state: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(weight, batch)
        change, state = update(gradient, state, weight)
        return weight + change, state, loss, gradient

    step = jax.jit(step) if is_compiled else step
    weight, gradients = jnp.ones(3), []
    for number in range(4):
        weight, state, _, gradient = step(weight, state, BATCH * (1 + number))
        gradients.append(float(gradient.mean()))
    run = closed(hook)
    if name != "accumulated":
        assert run.steps() == [0, 1, 2, 3]
        assert values(run, "parameter:gradient") == pytest.approx(gradients)
    elif (
        is_compiled
    ):  # outside of traces, the first of the transformations is recorded before the others are known
        assert run.steps() == [0, 1]
        assert values(run, "parameter:gradient") == pytest.approx([3**-0.5] * 2)  # of clipped ones
    if name == "clipped" and is_compiled:
        assert values(run, "optimizer:step_size/0") == pytest.approx([-0.1])
        assert values(run, "parameter", "max")[0] == 1.0


@pytest.mark.parametrize(
    ("name", "is_compiled"),
    [("clipped", True), ("clipped", False), ("limited", True), ("divided", True)],
)
def test_a_bad_update_in_several_transformations_is_left_out_as_a_whole(
    tmp_path: Path, name: str, is_compiled: bool
) -> None:
    with Hook(tmp_path, run="r", config=CaptureConfig(overhead_budget=None), on_nonfinite="skip") as hook:
        Recording(hook)
        state, update = in_parts(name)

        def step(weight: Any, state: Any, batch: Any) -> Any:
            change, state = update(jax.grad(loss_of)(weight, batch), state, weight)
            return weight + change, state

        step = jax.jit(step) if is_compiled else step
        weight, state = step(jnp.ones(3), state, BATCH)
        after, state_after = step(weight, state, BATCH * np.float32(np.nan))
        assert after.tolist() == weight.tolist()
        assert jax.tree.map(np.array_equal, state, state_after) == jax.tree.map(lambda _: True, state)
        step(after, state_after, BATCH)
    assert open_run(hook.run_url).steps() == [0, 1, 2]


class OwnAverage(NamedTuple):
    """The state of a transformation of the program's own, with the field names of that of `optax.ema`."""

    count: Any
    ema: Any


def test_an_optimizer_with_an_average_as_state_is_recorded_and_stopped(tmp_path: Path) -> None:
    def update(gradient: Any, state: OwnAverage, _: Any = None) -> Any:
        average = 0.9 * state.ema + 0.1 * gradient
        return -0.1 * average, OwnAverage(state.count + 1, average)

    weight, state = jnp.ones(3), OwnAverage(jnp.zeros((), int), jnp.zeros(3))
    hook = Hook(tmp_path, run="r", config=CaptureConfig(overhead_budget=None), on_nonfinite="stop")
    Recording(hook)
    step = jax.jit(stepping(optax.GradientTransformation(lambda _: state, update)))
    weight, state, _ = step(weight, state, BATCH)
    weight, state, _ = step(weight, state, BATCH * np.float32(np.nan))
    with hook, pytest.raises(StopTraining):
        step(weight, state, BATCH)
    assert open_run(hook.run_url).steps() == [0, 1]
    assert jnp.isfinite(weight).all()


def test_updates_in_the_branches_of_a_conditional_have_the_loss_before_it(hook: Hook) -> None:
    first, second = optax.sgd(0.1), optax.sgd(0.2)

    @jax.jit
    def step(weight: Any, number: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(weight, BATCH)
        update = jax.lax.cond(
            number % 2 == 0,
            lambda: first.update(gradient, first.init(weight), weight)[0],
            lambda: second.update(gradient, second.init(weight), weight)[0],
        )
        return weight + update, loss

    weight, losses = jnp.ones(3), []
    for number in range(4):
        weight, loss = step(weight, number)
        losses.append(float(loss))
    run = closed(hook)
    assert run.steps() == [0, 1, 2, 3]
    assert values(run, "loss") == pytest.approx(losses)


@pytest.mark.parametrize("figures", ["host", "device"])
@pytest.mark.parametrize("passes_weights", [True, False])
def test_steps_that_depend_on_each_other_are_no_parts_of_one(
    tmp_path: Path, passes_weights: bool, figures: Any
) -> None:
    with Hook(tmp_path, run="r", config=CaptureConfig(overhead_budget=None)) as hook:
        Recording(hook, figures=figures)
        optimizer = optax.adam(0.1)

        @jax.jit
        def steps(weight: Any, state: Any, batch: Any) -> Any:
            for _ in range(2):
                gradient = jax.grad(loss_of)(weight, batch)
                update, state = optimizer.update(gradient, state, weight if passes_weights else None)
                weight += update
            return weight, state

        weight, state = jnp.ones(3), optimizer.init(jnp.ones(3))
        for _ in range(2):
            weight, state = steps(weight, state, BATCH)
    assert open_run(hook.run_url).steps() == [0, 1, 2, 3]


def test_several_updates_in_one_call_are_steps(hook: Hook) -> None:
    optimizer = optax.sgd(0.1)
    one = stepping(optimizer)

    @jax.jit
    def steps(weight: Any, state: Any) -> Any:
        for _ in range(5):
            weight, state, _ = one(weight, state, BATCH)
        return weight, state

    weight = jnp.ones(3)
    state = optimizer.init(weight)
    for _ in range(2):
        weight, state = steps(weight, state)
    run = closed(hook)
    assert run.tensor("parameter:gradient").steps() == list(range(10))
    assert values(run, "loss") == sorted(values(run, "loss"), reverse=True)


def test_a_compiled_helper_is_used_in_a_scan_and_under_vmap(hook: Hook) -> None:
    optimizer = optax.sgd(0.1)
    helper = jax.jit(stepping(optimizer))
    weight = jnp.ones(3)
    state = optimizer.init(weight)

    @jax.jit
    def epoch(weight: Any, state: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            weight, state, loss = helper(*carry, BATCH)
            return (weight, state), loss

        return jax.lax.scan(body, (weight, state), None, length=4)

    (weight, state), _ = epoch(weight, state)
    population = jnp.stack([weight, 2 * weight])
    trained, _, losses = jax.jit(jax.vmap(helper, in_axes=(0, None, None)))(population, state, BATCH)
    assert trained.shape == (2, 3)
    assert losses.shape == (2,)
    jax.export.export(jax.jit(lambda weight: helper(weight, state, BATCH)[0]))(weight)
    run = closed(hook)
    assert run.tensor("loss").steps() == [0, 1, 2, 3]


def test_a_call_that_raises_does_not_end_the_training(hook: Hook) -> None:
    optimizer = optax.sgd(0.1)
    fails = [True]

    def check(number: Any) -> Any:
        if fails[0] and int(number) == 2:
            fails[0] = False
            raise RuntimeError("planted")
        return np.float32(0)

    @jax.jit
    def epoch(weight: Any, state: Any) -> Any:
        def body(carry: Any, number: Any) -> Any:
            weight, state, loss = stepping(optimizer)(*carry, BATCH)
            return (
                weight + jax.pure_callback(check, jax.ShapeDtypeStruct((), np.float32), number),
                state,
            ), loss

        return jax.lax.scan(body, (weight, state), jnp.arange(4))

    weight = jnp.ones(3)
    state = optimizer.init(weight)
    raised = 0
    for _ in range(4):
        try:
            (after, state_after), losses = epoch(weight, state)
            losses.block_until_ready()
        except RuntimeError:
            raised += 1
        else:
            weight, state = after, state_after
    assert raised == 1
    assert closed(hook).tensor("loss").steps()[-1] >= 11


def test_steps_may_be_counted_by_hand(hook: Hook) -> None:
    optimizer = optax.sgd(0.1)
    step = jax.jit(stepping(optimizer))
    weight = jnp.ones(3)
    state = optimizer.init(weight)
    losses = []
    for _ in range(4):
        weight, state, loss = step(weight, state, BATCH)
        losses.append(float(loss))
        hook.step()
    run = closed(hook)
    assert run.tensor("loss").steps() == [0, 1, 2, 3]
    assert values(run, "loss") == pytest.approx(losses)


def test_a_later_hook_records_functions_that_an_earlier_one_has_traced(tmp_path: Path) -> None:
    found = []
    optimizer = optax.sgd(0.1)
    one = stepping(optimizer)

    def epoch(weight: Any, state: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            weight, state, loss = one(*carry, BATCH)
            return (weight, state), loss

        return jax.lax.scan(body, (weight, state), None, length=4)

    compiled: Any = None
    for name in ("a", "b"):
        hook = Hook(tmp_path, run=name, config=CaptureConfig(overhead_budget=None))
        Recording(hook)
        compiled = compiled or jax.jit(epoch)
        weight = jnp.ones(3)
        state = optimizer.init(weight)
        for _ in range(2):
            (weight, state), _ = compiled(weight, state)
        hook.close()
        found.append(values(open_run(hook.run_url), "loss"))
    assert found[0] == found[1]
    assert len(found[0]) == 8


def test_several_threads_train(hook: Hook) -> None:
    optimizer = optax.sgd(0.01)
    one = stepping(optimizer)

    @jax.jit
    def epoch(weight: Any, state: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (one(*carry, BATCH)[:2], 0.0), (weight, state), None, length=4)[
            0
        ]

    results: dict[int, list[float]] = {}

    def train(number: int) -> None:
        weight = jnp.full(3, 1.0 + number)
        state = optimizer.init(weight)
        for _ in range(20):
            weight, state = epoch(weight, state)
        results[number] = weight.tolist()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2]
    assert results[2][0] == pytest.approx(3 * results[0][0], rel=1e-5)


def test_checks_of_jax_see_the_program_alone(hook: Hook) -> None:
    optimizer = optax.chain(optax.zero_nans(), optax.sgd(0.1))
    step = jax.jit(stepping(optimizer))
    weight = jnp.ones(3)
    with jax.debug_nans(True):
        bad = jax.jit(lambda weight, state: optimizer.update(weight * jnp.float32(0), state)[0])
        assert np.isfinite(bad(weight, optimizer.init(weight))).all()
    with jax.checking_leaks():
        losses, _ = jax.jit(jax.vmap(jax.value_and_grad(loss_of), (None, 0)))(
            weight, jnp.stack([BATCH, BATCH])
        )
        assert losses.shape == (2,)
    lowered = jax.jit(stepping(optax.sgd(0.1))).lower(weight, optax.sgd(0.1).init(weight), BATCH)
    assert len(lowered.compile()(weight, optax.sgd(0.1).init(weight), BATCH)) == 3
    assert step.__wrapped__.__name__ == "step"


def module_level(number: Any) -> Any:
    return number * 2


def test_a_callable_object_that_is_compiled_at_each_step_is_traced_once(hook: Hook) -> None:
    optimizer, traces = optax.sgd(0.1), []

    class Step:
        def __call__(self, weight: Any, state: Any, batch: Any) -> Any:
            traces.append(1)
            return stepping(optimizer)(weight, state, batch)

    step = Step()
    weight = jnp.ones(3)
    state = optimizer.init(weight)
    weight, state, _ = jax.jit(step)(weight, state, BATCH)
    first = len(traces)
    for _ in range(4):
        weight, state, _ = jax.jit(step)(weight, state, BATCH)
    assert len(traces) == first
    assert closed(hook).tensor("loss").steps() == [0, 1, 2, 3, 4]


def test_functions_and_optimizers_are_copied_and_compared(hook: Hook) -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, state

    init = optax.sgd(0.1).init
    assert optax.GradientTransformation(init, update) == optax.GradientTransformation(init, update)
    assert hash(optax.GradientTransformation(init, update)) == hash(
        optax.GradientTransformation(init, update)
    )
    compiled = jax.jit(module_level)
    assert copy.copy(compiled)(2) == copy.deepcopy(compiled)(2) == 4
    assert compiled.__name__ == "module_level"
    optimizer = optax.GradientTransformation(module_level, module_level)
    assert pickle.loads(pickle.dumps(optimizer)).update(3) == 6


def test_a_recording_does_not_start_the_backend(tmp_path: Path) -> None:
    program = (
        "import jax, watchstep\n"
        "from watchstep.jax import Recording\n"
        f"hook = watchstep.Hook({str(tmp_path)!r}, run='r'); Recording(hook)\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"
        "assert jax.device_count() == 2\n"
        "hook.close()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_another_model_counts_steps_once_the_first_is_trained(hook: Hook) -> None:
    for size in (3, 4):
        optimizer = optax.sgd(0.01)
        step = jax.jit(stepping(optimizer))
        weight, batch = jnp.ones(size), np.ones((2, size), np.float32)
        state = optimizer.init(weight)
        for _ in range(60):
            weight, state, _ = step(weight, state, batch)
    run = closed(hook)
    assert run.steps()[-1] > 90
