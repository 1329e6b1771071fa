"""Bundles of JAX steps: arguments of every kind return as they were, and ``watchstep replay`` names the first bad operation."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.recorded_programs import values
from tests.processes import run_python

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from watchstep import CaptureConfig, Hook, StopTraining, open_run  # noqa: E402
from watchstep.errors import ConfigError, FormatError, WatchstepError  # noqa: E402
from watchstep.format.bundle import Bundle, bundle_keys, open_bundle, open_bundle_file  # noqa: E402
from watchstep.format.layout import BundleKey  # noqa: E402
from watchstep.jax import Recording  # noqa: E402
from watchstep.jax.compiled_steps import CompiledStep, forget, observe  # noqa: E402
from watchstep.jax.replay.step_arguments import JaxStep, load_arguments, save_bundle  # noqa: E402
from watchstep.jax.replay.step_replay import replay_jax_step  # noqa: E402
from watchstep.store.store import Store  # noqa: E402

ROOT = Path(__file__).parents[3]


def arguments_of(seed: int) -> tuple[Any, ...]:
    generator = np.random.default_rng(seed)
    state = {
        "kernel": jnp.asarray(generator.normal(size=(3, 2)), jnp.bfloat16),
        "narrow": jnp.asarray(generator.normal(size=4), "float8_e4m3fn"),
        "complex": jnp.asarray(generator.normal(size=2) + 1j),
        "mask": jnp.asarray(generator.normal(size=5) > 0),
        "empty": jnp.zeros((0, 3)),
    }
    key = jax.random.key(seed)
    return state, [generator.integers(9, size=3), seed, seed + 0.5], (key, jax.random.PRNGKey(seed)), "text"


def same(recorded: Any, other: Any) -> None:
    flat, structure = jax.tree_util.tree_flatten(recorded)
    expected, expected_structure = jax.tree_util.tree_flatten(other)
    assert structure == expected_structure
    for value, wanted in zip(flat, expected, strict=True):
        assert type(value) is type(wanted)
        if hasattr(wanted, "dtype"):
            assert value.dtype == wanted.dtype
            is_key = jax.dtypes.issubdtype(wanted.dtype, jax.dtypes.prng_key)
            a, b = map(jax.random.key_data, (value, wanted)) if is_key else (value, wanted)
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        else:
            assert value == wanted


def test_arguments_return_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    save_bundle(path, *arguments_of(1), step=7, scale=2.0, reference=jax.new_ref(jnp.arange(3.0)))
    bundle = open_bundle_file(path)
    assert (bundle.document.step, bundle.document.lost) == (7, ())
    template = {"scale": 1.0, "reference": jax.new_ref(jnp.zeros(3))}
    arguments, keywords = load_arguments(bundle, JaxStep(print, arguments_of(2), template))
    same(arguments, arguments_of(1))
    assert keywords["scale"] == 2.0
    assert (np.asarray(keywords["reference"][...]) == np.arange(3)).all()
    assert [each.name for each in tmp_path.iterdir()] == ["step.safetensors"]


def bundled_batches(
    folder: Path, batch_of: Callable[[int], Any], shape: tuple[int, int] = (2, 4)
) -> tuple[dict[str, Any], Hook]:
    """Train on a batch with NaN at step 3, drop each loss at once, and return the batches of the bundles by their reasons."""
    hook = Hook(folder, on_nonfinite="skip", config=CaptureConfig(overhead_budget=None))
    Recording(hook)
    optimizer = optax.sgd(1e-6)

    @jax.jit
    def step(weight: Any, state: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda weight: ((batch @ weight) ** 2).mean())(weight)
        updates, state = optimizer.update(gradient, state, weight)
        return optax.apply_updates(weight, updates), state, loss

    weight = jnp.ones(shape[1])
    state = optimizer.init(weight)

    def train(number: int) -> None:
        nonlocal weight, state
        weight, state, loss = step(weight, state, batch_of(number))
        float(loss)

    for number in range(8):
        train(number)
    hook.close()
    store = Store.open(hook.run_url)
    bundles = [open_bundle(store, key.path) for key in bundle_keys(store)]
    return {bundle.document.reason: _batch_of(bundle, shape) for bundle in bundles}, hook


def _batch_of(bundle: Bundle, shape: tuple[int, int]) -> Any:
    (name,) = (name for name, location in bundle.tensors.items() if location.shape == shape)
    return bundle.read(name)[0].view(np.float32)


def numbered(number: int) -> Any:
    return np.full((2, 4), np.nan if number == 3 else number, np.float32)


def test_the_batch_of_a_bad_step_is_its_own_where_an_array_before_it_was_deleted(tmp_path: Path) -> None:
    batches, _ = bundled_batches(tmp_path, lambda number: jnp.asarray(numbered(number)))
    assert np.isnan(batches["gate"]).all()


@pytest.mark.parametrize("shape", [(2, 4), (256, 784), (4096, 512)])
def test_a_batch_that_the_program_has_overwritten_is_not_that_of_the_bad_step(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    memory = np.zeros(shape, np.float32)

    def refilled(number: int) -> Any:
        memory[:, 1:] = np.nan if number == 3 else number  # the first column is the same in all batches
        return memory

    batches, hook = bundled_batches(tmp_path, refilled, shape)
    assert list(batches) == ["alert"]  # the next complete step
    assert "has written to an array" in hook.health["notes"]["bundles"]


def aligned(shape: tuple[int, int]) -> Any:
    """An array of NumPy whose memory JAX shares instead of copying it."""
    size = 4 * math.prod(shape)
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(np.float32).reshape(shape)


@pytest.mark.parametrize("shape", [(2, 4), (4096, 512)])
@pytest.mark.parametrize("share", [jax.device_put, jnp.from_dlpack])
def test_a_batch_that_shares_overwritten_memory_is_not_that_of_the_bad_step(
    tmp_path: Path, share: Any, shape: tuple[int, int]
) -> None:
    memory = aligned(shape)

    def refilled(number: int) -> Any:
        memory[:] = np.nan if number == 3 else number
        batch = share(memory)
        assert batch.unsafe_buffer_pointer() == memory.ctypes.data
        return batch

    batches, hook = bundled_batches(tmp_path, refilled, shape)
    assert list(batches) == ["alert"]  # the next complete step
    assert "has written to an array" in hook.health["notes"]["bundles"]


def gate_bundle(hook: Hook) -> Bundle:
    store = Store.open(hook.run_url)
    (key,) = (key for key in bundle_keys(store) if key.reason == "gate")
    return open_bundle(store, key.path)


def adam_step(donates: tuple[int, ...] = ()) -> tuple[Any, Callable[[float], Any]]:
    """A compiled step, and a function that returns its parameters and optimizer state."""
    optimizer = optax.adam(0.1)

    def step(weight: Any, state: Any, batch: Any) -> Any:
        gradient = jax.grad(lambda weight: ((batch * weight) ** 2).sum())(weight)
        updates, state = optimizer.update(gradient, state, weight)
        return optax.apply_updates(weight, updates), state

    def started(value: float) -> Any:
        weight = jnp.full(3, value)
        return weight, optimizer.init(weight)

    return jax.jit(step, donate_argnums=donates), started


class Meeting:
    """Lets calls of steps in two threads overlap: both are about to be made before one is."""

    def __init__(self) -> None:
        self.entered, self._barrier = threading.Event(), threading.Barrier(2)

    def about_to_dispatch(self, *_: Any) -> None:
        self.entered.set()
        self._barrier.wait(60)

    def dispatched(self, *_: Any) -> None:
        pass

    def dispatch_failed(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("donates", [(), (0, 1)])
def test_calls_in_two_threads_have_arguments_and_weights_of_their_own(
    tmp_path: Path, donates: tuple[int, ...]
) -> None:
    hook = Hook(tmp_path, on_nonfinite="skip", config=CaptureConfig(overhead_budget=None))
    Recording(hook)
    step, started = adam_step(donates)
    models, starts = [started(1.0), started(2.0)], []
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for number in range(4):
            batches = [
                np.full(3, np.nan if (number, place) == (2, 0) else 1.0, np.float32) for place in (0, 1)
            ]
            starts += [float(weight.mean()) for weight, _ in models]
            if number == 2:
                expected = *jax.tree.map(jnp.copy, models[0]), batches[0]
            meeting = Meeting()
            observe(meeting)
            one = first.submit(functools.partial(step, *models[0], batches[0]))
            assert meeting.entered.wait(60)
            other = second.submit(functools.partial(step, *models[1], batches[1]))
            models = [one.result(), other.result()]
            forget(meeting)
    hook.close()
    bundle = gate_bundle(hook)
    loaded, _ = load_arguments(bundle, JaxStep(step, (*started(0.0), np.zeros(3, np.float32))))
    same(loaded, expected)
    assert not bundle.document.lost
    run = open_run(hook.run_url)
    (weight,) = (name for name in run.tensors() if run.tensor(name).info.role == "weight")
    means = values(run, weight)
    assert sorted(means) == pytest.approx(sorted(starts))


def test_a_bad_last_step_is_bundled(tmp_path: Path) -> None:
    hook = Hook(tmp_path, on_nonfinite="stop", config=CaptureConfig(overhead_budget=None))
    Recording(hook)
    step, started = adam_step((0, 1))
    model = step(*started(1.0), np.ones(3, np.float32))
    expected = *jax.tree.map(jnp.copy, model), np.full(3, np.nan, np.float32)
    model = step(*model, expected[2])
    hook.close()
    built = *started(0.0), np.zeros(3, np.float32)
    same(load_arguments(gate_bundle(hook), JaxStep(step, built))[0], expected)


@pytest.mark.parametrize("kind", ["returned in another place", "changed besides"])
def test_donated_models_are_known_by_what_the_step_computes(tmp_path: Path, kind: str) -> None:
    hook = Hook(tmp_path, on_nonfinite="skip", config=CaptureConfig(overhead_budget=None))
    Recording(hook)
    optimizer = optax.adam(0.1)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(learner: Any, teacher: Any, batch: Any) -> Any:
        weight, state = learner

        def loss_of(weight: Any) -> Any:
            return ((weight - teacher[0] + batch) ** 2).sum()

        updates, state = optimizer.update(jax.grad(loss_of)(weight), state, weight)
        learner = jax.jit(optax.apply_updates)(weight, updates), state
        if kind == "changed besides":
            return (learner[0] * 0.9, state), teacher
        return teacher, learner

    def started(first: float, second: float) -> Any:
        models = [
            jnp.full((2**9, 2**9), value, jnp.bfloat16) for value in (first, second)
        ]  # more than is copied
        return tuple((model, optimizer.init(model)) for model in models)

    models = started(1.0, 2.0)
    for number in range(5):
        batch = np.full((2**9, 2**9), np.nan if number == 3 else 1, np.float32)
        if number == 3:
            expected = *jax.tree.map(jnp.copy, models), batch
        models = step(*models, batch)
    hook.close()
    built = *started(3.0, 4.0), np.zeros((2**9, 2**9), np.float32)
    bundle = gate_bundle(hook)
    loaded, _ = load_arguments(bundle, JaxStep(step, built))
    if kind == "changed besides":
        assert [each.path for each in bundle.document.lost] == ["arguments/arguments[0][0]"]
        expected = (built[0][0], expected[0][1]), *expected[1:]
    else:
        assert not bundle.document.lost
    same(loaded, expected)


def test_a_whole_number_that_went_through_a_float_is_lost(tmp_path: Path) -> None:
    hook = Hook(tmp_path, on_nonfinite="skip", config=CaptureConfig(overhead_budget=None))
    Recording(hook)
    optimizer = optax.sgd(0.1)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(weight: Any, state: Any, counts: Any, batch: Any) -> Any:
        updates, state = optimizer.update(jax.grad(lambda weight: (weight * batch).sum())(weight), state)
        return optax.apply_updates(weight, updates), state, counts.astype(jnp.float32).astype(jnp.int32)

    weight = jnp.ones(3)
    state = optimizer.init(weight)
    counts = jnp.arange(2**24, 2**24 + 2**18, dtype=jnp.int32)  # more than is copied
    for number in range(5):
        batch = np.full(3, np.nan if number == 3 else 1, np.float32)
        weight, state, counts = step(weight, state, counts, batch)
    hook.close()
    assert [each.path for each in gate_bundle(hook).document.lost] == ["arguments/arguments[2]"]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_an_optimizer_outside_of_compiled_functions_is_compiled_once(
    policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = Hook(tmp_path, on_nonfinite=policy)
    Recording(hook)
    optimizer = optax.adam(0.1)
    gradient = jax.jit(jax.grad(lambda weights, x: sum((w * x).sum() ** 2 for w in weights)))
    weights = [jnp.ones(size) for size in (1, 2, 3)]
    state = optimizer.init(weights)
    compiled = []
    with jax.log_compiles():
        for _ in range(6):
            caplog.clear()
            updates, state = optimizer.update(gradient(weights, 0.5), state, weights)
            weights = optax.apply_updates(weights, updates)
            compiled.append(sum("Compiling" in record.getMessage() for record in caplog.records))
    hook.close()
    assert compiled[2:] == [0, 0, 0, 0]
    assert not hook.health["faults"]


def test_parameters_that_a_part_of_an_optimizer_has_changed_are_lost(tmp_path: Path) -> None:
    hook = Hook(tmp_path, on_nonfinite="stop", config=CaptureConfig(overhead_budget=None))
    Recording(hook)
    parts = {"a": optax.apply_if_finite(optax.adam(0.1), 5), "b": optax.adam(0.1)}
    optimizer = optax.partition(parts, {"a": "a", "b": "b"})

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, state: Any, batch: Any) -> Any:
        gradients = {"a": weights["a"] * batch, "b": weights["b"]}
        loss, _ = jax.value_and_grad(lambda weights: (weights["a"] * batch).sum())(weights)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    weights = {"a": jnp.ones(3), "b": jnp.ones(3)}
    state = optimizer.init(weights)
    for number in range(4):
        batch = np.full(3, np.nan if number == 2 else 1, np.float32)
        if number == 2:
            expected = np.asarray(weights["a"]).copy()
        weights, state, _ = step(weights, state, batch)
    hook.close()
    bundle = gate_bundle(hook)
    built = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    (loaded, *_), _ = load_arguments(bundle, JaxStep(step, (built, optimizer.init(built), batch)))
    np.testing.assert_array_equal(loaded["a"], expected)
    lost = {each.path: each.reason for each in bundle.document.lost}
    assert "may have changed it" in lost["arguments/arguments[0].b"]


@pytest.mark.parametrize("first_bad", [0, 3])
@pytest.mark.parametrize("donates", [False, True])
def test_a_bundle_has_what_the_step_carries_as_it_was_before(
    tmp_path: Path, *, donates: bool, first_bad: int
) -> None:
    hook = Hook(tmp_path, on_nonfinite="skip", config=CaptureConfig(overhead_budget=None))
    Recording(hook)
    scale, rate = optax.scale_by_adam(), optax.scale_by_schedule(lambda count: -0.1 / (1 + count))
    arguments_of_bad: tuple[Any, ...] = ()

    def step(state: Any, batch: Any, counter: Any) -> Any:
        key, now = jax.random.split(state["key"])
        x = batch * jax.random.uniform(now, (4,))
        loss, gradients = jax.value_and_grad(lambda weight: ((x @ weight) ** 2).mean())(state["weight"])
        updates, moments = scale.update(gradients, state["moments"])
        updates, count = rate.update(updates, state["count"])
        counter[...] += 1
        return {
            **state,
            "weight": optax.apply_updates(state["weight"], updates),
            "moments": moments,
            "count": count,
            "key": key,
            "statistics": state["statistics"] * 0.9 + x.mean() * 0.1,
            "average": state["average"] * 0.9 + state["weight"].sum() * 0.1,
        }, loss

    compiled = jax.jit(step, donate_argnames="state" if donates else ())
    weight = jnp.ones(4)
    state = {
        "weight": weight,
        "moments": scale.init(weight),
        "count": rate.init(weight),
        "key": jax.random.key(7),
        "statistics": jnp.zeros(3),
        "average": jnp.zeros(2**19),  # 2 MiB
    }
    counter = jax.new_ref(jnp.zeros((), int))
    for number in range(6):
        batch = np.full((2, 4), np.nan if number == first_bad else 1, np.float32)
        if number == first_bad:
            arguments_of_bad = jax.tree.map(jnp.copy, state), batch, counter[...]
        state, _ = compiled(state, batch, counter)
    hook.close()
    store = Store.open(hook.run_url)
    (key,) = (key for key in bundle_keys(store) if key.reason == "gate")
    bundle = open_bundle(store, key.path)
    before, batch, count = arguments_of_bad
    built = {**before, "average": jnp.ones(2**19)}
    arguments = built, batch, jax.new_ref(jnp.zeros((), int))
    (*loaded, loaded_counter), _ = load_arguments(bundle, JaxStep(compiled, arguments))
    lost = [each.path for each in bundle.document.lost]
    assert lost == (["arguments/arguments[0].average"] if donates else [])
    same((*loaded, loaded_counter[...]), (built if donates else before, batch, count))


@pytest.mark.parametrize("kind", ["made", "left out"])
@pytest.mark.parametrize("donates", [False, True])
def test_what_an_update_that_the_policy_has_not_withheld_changed_is_not_that_before_the_step(
    tmp_path: Path, *, donates: bool, kind: str
) -> None:
    hook = Hook(tmp_path, on_nonfinite="stop", config=CaptureConfig(overhead_budget=None))
    Recording(hook)
    optimizer = optax.trace(0.9)
    if kind == "left out":
        optimizer = optax.apply_if_finite(optimizer, 5)

    def loss_of(weight: Any, batch: Any) -> Any:
        if kind == "left out":
            return (jnp.sqrt(batch) * weight).sum()
        return (batch * weight).sum() + jax.lax.stop_gradient(jnp.sqrt(batch).sum())

    def step(weight: Any, state: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(weight, batch)
        updates, state = optimizer.update(gradient, state, weight)
        return optax.apply_updates(weight, updates), state, loss

    compiled = jax.jit(step, donate_argnums=(0, 1) if donates else ())
    weight = jnp.ones(3)
    state = optimizer.init(weight)
    arguments_of_bad: tuple[Any, ...] = ()
    for number in range(5):
        batch = np.full(3, -1 if number == 2 else 1, np.float32)
        if number == 2:
            arguments_of_bad = *jax.tree.map(jnp.copy, (weight, state)), batch
        weight, state, _ = compiled(weight, state, batch)
    hook.close()
    store = Store.open(hook.run_url)
    bundles = {key.reason: open_bundle(store, key.path) for key in bundle_keys(store)}
    if donates and kind == "made":
        assert "gate" not in bundles
        assert "its update was made" in hook.health["notes"]["bundles"]
        return
    built = jnp.zeros(3), optimizer.init(jnp.zeros(3)), np.zeros(3, np.float32)
    loaded, _ = load_arguments(bundles["gate"], JaxStep(compiled, built))
    expected = (arguments_of_bad[0], built[1], arguments_of_bad[2]) if donates else arguments_of_bad
    same(loaded, expected)
    assert [each.reason for each in bundles["gate"].document.lost] == (
        ["it is not kept, and the optimizer has counted the update that it left out"]
        * len(jax.tree.leaves(built[1]))
        if donates
        else []
    )


def test_a_step_with_arguments_of_several_structures_in_turn_is_described_once_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[int] = []
    layouts_of = CompiledStep._stacked

    def counted(*arguments: Any) -> Any:
        described.append(1)
        return layouts_of(*arguments)

    monkeypatch.setattr(CompiledStep, "_stacked", counted)
    hook = Hook(tmp_path, on_nonfinite="stop", config=CaptureConfig(overhead_budget=None))
    Recording(hook)
    optimizer = optax.sgd(0.1)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weight: Any, key: Any, batch: Any) -> Any:
        key, _ = jax.random.split(key)
        gradient = jax.grad(lambda weight: sum((each * weight).sum() for each in batch))(weight)
        updates, _ = optimizer.update(gradient, optimizer.init(weight))
        return optax.apply_updates(weight, updates), key

    weight, key, expected = jnp.ones(3), jax.random.key(0), b""
    for number in range(10):
        batch = [np.ones(3, np.float32)] * (1 + number % 2)
        if number == 8:
            batch, expected = [np.full(3, np.nan, np.float32)], jax.random.key_data(key).tobytes()
        weight, key = step(weight, key, batch) if number < 9 else (weight, key)
    with pytest.raises(StopTraining), hook:
        step(weight, key, [np.ones(3, np.float32)])
    assert len(described) == 2
    store = Store.open(hook.run_url)
    (bundle_key,) = (each for each in bundle_keys(store) if each.reason == "gate")
    bundle = open_bundle(store, bundle_key.path)
    built = jnp.zeros(3), jax.random.key(1), [np.zeros(3, np.float32)]
    (_, loaded, _), _ = load_arguments(bundle, JaxStep(step, built))
    assert jax.random.key_data(loaded).tobytes() == expected


@jax.tree_util.register_pytree_node_class
class State:
    """A state whose class accepts arrays only."""

    def __init__(self, weight: Any, average: Any) -> None:
        self.weight, self.average, self.shape = weight, average, average.shape

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.weight, self.average), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> State:
        return cls(*children)


def test_a_state_of_a_class_of_the_program_is_bundled_where_a_part_of_it_is_lost(tmp_path: Path) -> None:
    hook = Hook(tmp_path, on_nonfinite="stop", config=CaptureConfig(overhead_budget=None))
    Recording(hook)
    optimizer = optax.sgd(0.1)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, batch: Any) -> State:
        gradient = jax.grad(lambda weight: ((batch * weight) ** 2).sum())(state.weight)
        updates, _ = optimizer.update(gradient, optimizer.init(state.weight))
        return State(optax.apply_updates(state.weight, updates), state.average * 0.9)

    state = State(jnp.ones(3), jnp.zeros(2**19))  # 2 MiB
    for number in range(3):
        state = step(state, np.full(3, np.nan if number == 2 else 1, np.float32))
    with pytest.raises(StopTraining), hook:
        step(state, np.ones(3, np.float32))
    store = Store.open(hook.run_url)
    (key,) = (key for key in bundle_keys(store) if key.reason == "gate")
    document = open_bundle(store, key.path).document
    assert (document.step, len(document.lost)) == (2, 1)
    assert not hook.health["faults"]


def test_a_bundle_of_a_run_is_chosen_by_its_step(tmp_path: Path) -> None:
    run = tmp_path / "runs/default/toy"
    for step in (3, 5):
        path = run / BundleKey("a1", 0, step, "program").path
        path.parent.mkdir(parents=True, exist_ok=True)
        save_bundle(path, jnp.full(3, step), step=step)
    (key, _) = bundle_keys(Store.open(run))
    assert key.step == 3
    bundle = open_bundle(Store.open(run), key.path)
    assert load_arguments(bundle, JaxStep(print, (jnp.zeros(3, int),)))[0][0][0] == 3


def test_a_bundle_of_another_step_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    save_bundle(path, {"a": jnp.ones(3)}, 2**70)
    bundle = open_bundle_file(path)
    for arguments, message in (
        (({"a": jnp.ones(4)}, 1), r"arguments\[0\].a is F32 \(3,\), the program's is float32 \(4,\)"),
        (({"a": jnp.ones(3, jnp.int32)}, 1), r"the program's is int32"),
        (({"b": jnp.ones(3)}, 1), r"the program's step has no arguments\[0\].a"),
        (({"a": jnp.ones(3)}, 1, 2), r"has no arguments\[2\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_arguments(bundle, JaxStep(print, arguments))
    with pytest.raises(ConfigError, match="does not end in"):
        save_bundle(tmp_path / "step.npz", 1)


def test_a_number_of_the_program_accepts_what_a_step_has_made_of_it(tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    save_bundle(path, {"step": jnp.asarray(7, jnp.int32), "scale": jnp.asarray(0.5, jnp.float32)})
    bundle = open_bundle_file(path)
    (state,), _ = load_arguments(bundle, JaxStep(print, ({"step": 0, "scale": 1.0},)))
    assert (state["step"].dtype, int(state["step"]), float(state["scale"])) == (jnp.int32, 7, 0.5)
    with pytest.raises(ConfigError, match="scale is F32"):
        load_arguments(bundle, JaxStep(print, ({"step": 0, "scale": 1},)))


def test_a_replay_states_the_values_that_the_bundle_lacks(tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    save_bundle(path, {"a": jnp.ones(3)}, 2**70)
    replay = replay_jax_step(
        open_bundle_file(path), JaxStep(lambda tree, power: tree["a"] * power, ({"a": jnp.zeros(3)}, 2))
    )
    assert replay.evaluation.results.tolist() == [2, 2, 2]
    assert "note: arguments[1] is lost (it does not fit into 64 bits): the replay has the value that" in str(
        replay
    )


def test_a_bundle_has_no_secret_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key", "confidential", "--steps=9"])
    save_bundle(tmp_path / "step.safetensors", jnp.ones(2))
    program = open_bundle_file(tmp_path / "step.safetensors").document.program
    assert program["argv"] == ["train.py", "--api-key", "(hidden)", "--steps=9"]
    assert program["versions"]["jax"] == jax.__version__


def test_damaged_bundles_are_named(tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    save_bundle(path, {"a": jnp.ones(3)})
    content = path.read_bytes()
    step = JaxStep(lambda tree: tree["a"], ({"a": jnp.zeros(3)},))
    generator = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(content)
        for place in generator.integers(len(damaged), size=3):
            damaged[place] = generator.integers(256)
        path.write_bytes(damaged[: generator.integers(len(damaged)) if generator.random() < 0.3 else None])
        try:
            load_arguments(open_bundle_file(path), step)
        except WatchstepError:
            continue
    path.write_bytes(content.replace(b'"leaves":[{', b'"leaves":{"a"'))
    with pytest.raises(FormatError):
        load_arguments(open_bundle_file(path), step)


def test_a_healthy_step_has_no_bad_operation(tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    save_bundle(path, jnp.ones(3))
    replay = replay_jax_step(open_bundle_file(path), JaxStep(jax.jit(jnp.sin), (jnp.zeros(3),)))
    assert not replay.fails
    assert "all results are finite" in str(replay)


PROGRAM = """
import jax
import jax.numpy as jnp
from jax import lax
from watchstep.jax import Recording  # noqa: E402
from watchstep.jax.compiled_steps import CompiledStep  # noqa: E402
from watchstep.jax.replay.step_arguments import JaxStep, save_bundle


def layer(x, weights):
    return jnp.exp(x @ weights) - 1, None


def loss(params, x):
    return lax.scan(layer, x, params["layers"])[0].mean()


@jax.jit
def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, params, gradients), value


def build():
    return {"layers": jnp.zeros((4, 3, 3))}, jnp.ones((2, 3))


def replay():
    return JaxStep(step, build())


if __name__ == "__main__":
    params, x = build()
    params["layers"] = params["layers"].at[:].set(jnp.eye(3) * 0.1).at[2].set(1e4)
    save_bundle("bad.safetensors", params, x, step=12)
"""


def test_the_command_names_the_operation(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}

    def execute(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    assert execute("train.py").returncode == 0
    replay = ("-m", "watchstep.command", "replay", "bad.safetensors", "--program", "train.py")
    done = execute(*replay, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    operation = data["first_bad"]["operation"]
    assert (data["step"], operation["primitive"], operation["path"]) == (12, "exp", "scan[2]/exp")
    assert (
        operation["line"]["line"]
        == PROGRAM.splitlines().index("    return jnp.exp(x @ weights) - 1, None") + 1
    )
    done = execute(*replay, "--precision", "fp64")
    assert done.returncode == 2
    assert "does not apply to a bundle of a JAX step" in done.stderr


def test_the_examples_of_the_guide_run(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/jax-replay.md").read_text(encoding="utf-8")
    first, bundled = re.findall(r"^```\{ \.python \.no-run \}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    printed = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "first.py").write_text(first)
    (tmp_path / "train.py").write_text(bundled)
    replay = ("-m", "watchstep.command", "replay", "bad.safetensors", "--program", "train.py")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    for arguments, expected in ((("first.py",), printed[0]), (("train.py",), ""), (replay, printed[1])):
        output = run_python(*arguments, cwd=tmp_path, env=environment)
        shown = output.replace(f"{tmp_path.resolve()}/", "").replace("first.py", "train.py")
        assert shown == expected
