"""The step that stops an unmodified JAX program is computed again, and the operation, the line and the bad argument are named."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from watchstep import Hook, StopTraining, open_run  # noqa: E402
from watchstep.jax import Recording, compiled_steps  # noqa: E402
from watchstep.jax.replay import step_redo  # noqa: E402
from watchstep.jax.replay.interpreter import ProgramLimits  # noqa: E402
from watchstep.trace import diagnose, open_trace  # noqa: E402

_BAD = 7
Program = Callable[[], None]


def batches(count: int = 20) -> Any:
    """Inputs and targets, of which one has no logarithm."""
    generator = np.random.default_rng(1)
    for number in range(count):
        x, y = generator.normal(size=(8, 4)), generator.uniform(0.5, 1.5, size=(8, 1))
        y[3] = 0.0 if number == _BAD else y[3]
        yield x.astype(np.float32), y.astype(np.float32)


def weights() -> Any:
    return {"w": jnp.full((4, 1), 0.1), "b": jnp.zeros(1)}


def loss_of(params: Any, x: Any, y: Any) -> Any:
    return ((x @ params["w"] + params["b"] - jnp.log(y)) ** 2).mean()  # bad


def donates() -> None:
    optimizer = optax.adam(1e-2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = weights()
    state = optimizer.init(params)
    for x, y in batches():
        params, state, _ = step(params, state, x, y)


def has_aux() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def loss_with_metrics(params: Any, x: Any, y: Any) -> Any:
        error = x @ params["w"] + params["b"] - jnp.log(y)  # bad of has_aux
        return (error**2).mean(), {"on purpose": jnp.log(-jnp.abs(x).sum())}

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        (loss, metrics), gradients = jax.value_and_grad(loss_with_metrics, has_aux=True)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, metrics

    params = weights()
    state = optimizer.init(params)
    for x, y in batches():
        params, state, *_ = step(params, state, x, y)


def scans_over_layers() -> None:
    optimizer = optax.sgd(1e-3)

    def layer(x: Any, inputs: Any) -> Any:
        weight, scale = inputs
        return x @ weight / scale, None  # bad of scans_over_layers

    @jax.jit
    def step(params: Any, state: Any, x: Any, scales: Any) -> Any:
        def loss_of_layers(params: Any) -> Any:
            return (jax.lax.scan(layer, x, (params, scales))[0] ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of_layers)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jnp.stack([jnp.eye(4)] * 6)
    state = optimizer.init(params)
    for number, (x, _) in enumerate(batches()):
        scales = np.ones(6, np.float32)
        scales[2] = 0.0 if number == _BAD else 1.0
        params, state, _ = step(params, state, x, scales)


def scans_over_steps() -> None:
    optimizer = optax.adam(1e-2)

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        loss, gradients = jax.value_and_grad(loss_of)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    @jax.jit
    def epoch(carry: Any, given: Any) -> Any:
        return jax.lax.scan(step, carry, given)

    params = weights()
    carry = params, optimizer.init(params)
    several = list(batches(40))
    for first in range(0, 40, 4):
        given = jax.tree.map(lambda *each: jnp.stack(each), *several[first : first + 4])
        carry, _ = epoch(carry, given)


def accumulates() -> None:
    optimizer = optax.MultiSteps(optax.adam(1e-2), 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = weights()
    state = optimizer.init(params)
    for x, y in batches():
        params, state = step(params, state, x, y)


@jax.custom_vjp
def root(x: Any) -> Any:
    return jnp.sqrt(x)


def root_forward(x: Any) -> Any:
    return jnp.sqrt(x), x


def root_backward(x: Any, gradient: Any) -> Any:
    return (gradient / (2 * jnp.sqrt(x)),)  # bad of defines_a_backward_pass


root.defvjp(root_forward, root_backward)


def defines_a_backward_pass() -> None:
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda params: root(jnp.abs(x @ params["w"]) * y).mean())(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = weights()
    state = optimizer.init(params)
    for x, y in batches():
        params, state, _ = step(params, state, x, y)


def checkpoints() -> None:
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(jax.checkpoint(loss_of))(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = weights()
    state = optimizer.init(params)
    for x, y in batches():
        params, state, _ = step(params, state, x, y)


def leaves_out_by_itself() -> None:
    optimizer = optax.apply_if_finite(optax.adam(1e-2), 5)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        _, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = weights()
    state = optimizer.init(params)
    for x, y in batches():
        params, state = step(params, state, x, y)


def updates_outside() -> None:
    optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-2))
    gradients_of = jax.jit(jax.value_and_grad(loss_of))
    params = weights()
    state = optimizer.init(params)
    for x, y in batches():
        _, gradients = gradients_of(params, x, y)
        gradients = jax.tree.map(lambda each: each * 2, gradients)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)


def updates_in_another_function() -> None:
    optimizer = optax.adam(1e-2)
    gradients_of = jax.jit(jax.value_and_grad(loss_of))

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def update(gradients: Any, params: Any, state: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = weights()
    state = optimizer.init(params)
    for x, y in batches():
        _, gradients = gradients_of(params, x, y)
        params, state = update(gradients, params, state)


def calls_linen() -> None:
    linen = pytest.importorskip("flax.linen")
    from flax.training.train_state import TrainState

    class Network(linen.Module):  # type: ignore[name-defined]
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(8)(x))
            return linen.Dense(1)(x)

    network = Network()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state: Any, statistics: Any, x: Any, y: Any) -> Any:
        def loss_of_network(params: Any) -> Any:
            output, changed = state.apply_fn(
                {"params": params, "batch_stats": statistics}, x, mutable="batch_stats"
            )
            return ((output - jnp.log(y)) ** 2).mean(), changed["batch_stats"]  # bad of calls_linen

        (loss, statistics), gradients = jax.value_and_grad(loss_of_network, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients), statistics, loss

    variables = network.init(jax.random.key(0), jnp.ones((8, 4)))
    state = TrainState.create(apply_fn=network.apply, params=variables["params"], tx=optax.adam(1e-2))
    statistics = variables["batch_stats"]
    for x, y in batches():
        state, statistics, _ = step(state, statistics, x, y)


def calls_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        def loss_of_model(model: Any) -> Any:
            return ((model(x) - jnp.log(y)) ** 2).mean()  # bad of calls_nnx

        loss, gradients = nnx.value_and_grad(loss_of_model)(model)
        optimizer.update(model, gradients)
        return loss

    for x, y in batches():
        step(model, optimizer, x, y)


def calls_equinox() -> None:
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.Linear(4, 1, key=jax.random.key(0))
    optimizer = optax.adam(1e-2)
    state = optimizer.init(equinox.filter(model, equinox.is_array))

    @equinox.filter_jit
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        def loss_of_model(model: Any) -> Any:
            return ((jax.vmap(model)(x) - jnp.log(y)) ** 2).mean()  # bad of calls_equinox

        loss, gradients = equinox.filter_value_and_grad(loss_of_model)(model)
        updates, state = optimizer.update(gradients, state, equinox.filter(model, equinox.is_array))
        return equinox.apply_updates(model, updates), state, loss

    for x, y in batches():
        model, state, _ = step(model, state, x, y)


def reads_bad_arguments(bad: str) -> None:
    """A program with a number that is not finite in an argument of its step."""
    optimizer = optax.adam(1e-2)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, state: Any, statistics: Any, batch: Any) -> Any:
        def loss_of_batch(params: Any) -> Any:
            hidden = batch["x"] @ params["w"] - statistics["mean"]
            return (hidden**2).mean(), hidden.mean()

        (loss, mean), gradients = jax.value_and_grad(loss_of_batch, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, {"mean": mean}, loss

    params, statistics = weights(), {"mean": jnp.zeros(())}
    state = optimizer.init(params)
    for number, (x, _) in enumerate(batches()):
        if number == _BAD and bad == "batch.x (data)":
            x[2, 1] = np.nan
        if number == _BAD and bad == "statistics.mean (state)":
            statistics["mean"] *= np.inf
        if number == _BAD and bad == "params.w (parameter)":
            params["w"] = params["w"].at[0].set(np.nan)
        params, state, statistics, _ = step(params, state, statistics, {"x": x})


def trains(y_of: Callable[[int, Any], Any], donated: tuple[int, ...] = (0, 1), size: int = 1) -> Any:
    """Train with the targets that a function changes, and return the parameters and losses."""
    optimizer = optax.adam(1e-2)

    @functools.partial(jax.jit, donate_argnums=donated)
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, y + 1

    params, losses = weights(), []
    state = optimizer.init(params)
    for number, (x, y) in enumerate(batches()):
        x, y = np.repeat(x, size, 0), np.repeat(y, size, 0)  # noqa: PLW2901 - larger ones
        params, state, loss, _ = step(params, state, x, y_of(number, y))
        losses.append(loss)
    return params, losses


def writes_to_its_batch() -> None:
    kept = np.ones((8, 1), np.float32)

    def y_of(number: int, y: Any) -> Any:
        kept[...] = y
        return kept

    trains(y_of)


def donates_a_large_batch() -> None:
    trains(lambda _, y: jnp.asarray(y), (0, 1, 3), 40_000)


def reads_the_host() -> None:
    """The fault is not in the arguments, and does not come again."""
    calls = []

    def host(_: Any) -> Any:
        calls.append(0)
        return np.float32(np.nan if len(calls) == _BAD + 1 else 1.0)

    optimizer = optax.sgd(1e-2)

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        factor = jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x.sum())
        loss, gradients = jax.value_and_grad(lambda params: ((x @ params["w"]) ** 2).mean() * factor)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = weights()
    state = optimizer.init(params)
    for x, _ in batches():
        params, state, _ = step(params, state, x)


def computes_without_compiling() -> None:
    optimizer = optax.sgd(1e-2)
    params = weights()
    state = optimizer.init(params)
    for x, y in batches():
        _, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)


def line_of(comment: str) -> int:
    source = inspect.getsource(sys.modules[__name__]).splitlines()
    return next(number for number, text in enumerate(source, 1) if text.endswith(f"# {comment}"))


def stopped(program: Program, folder: Path, figures: Any = None, **options: Any) -> tuple[str, Hook]:
    """The reason for which a program was stopped."""
    hook = Hook(folder, run="r", explain=True, **options)
    Recording(hook, figures=figures)
    with hook, pytest.raises(StopTraining) as stop:
        program()
    assert "explain" not in hook.health["faults"], hook.health["faults"]
    return stop.value.request.reason, hook


_PROGRAMS: list[tuple[Program, str, str]] = [
    (donates, "log", "bad"),
    (has_aux, "log", "bad of has_aux"),
    (scans_over_layers, "scan[2]/div", "bad of scans_over_layers"),
    (scans_over_steps, "scan[3]/log", "bad"),
    (accumulates, "log", "bad"),
    (defines_a_backward_pass, "div", "bad of defines_a_backward_pass"),
    (checkpoints, "log", "bad"),
    (leaves_out_by_itself, "log", "bad"),
    (updates_outside, "log", "bad"),
    (updates_in_another_function, "log", "bad"),
    (calls_linen, "log", "bad of calls_linen"),
    (calls_nnx, "log", "bad of calls_nnx"),
    (calls_equinox, "log", "bad of calls_equinox"),
]
_LATER = {checkpoints, calls_linen, calls_equinox}


@pytest.mark.parametrize(
    ("program", "operation", "comment"),
    [
        pytest.param(*each, id=each[0].__name__, marks=[pytest.mark.release] if each[0] in _LATER else [])
        for each in _PROGRAMS
    ],
)
def test_the_line_is_named(program: Program, operation: str, comment: str, tmp_path: Path) -> None:
    reason, hook = stopped(program, tmp_path)
    assert f"{operation} made the first NaN or infinity at {__file__}:{line_of(comment)} in " in reason
    assert ("approximate" in reason) == (program is leaves_out_by_itself)  # it has counted the step
    step = _BAD // 2 if program is accumulates else _BAD
    assert reason.startswith(f"the gradients of step {step} are not finite; ")
    run = open_run(hook.run_url)
    assert run.outcome().reason == reason
    first = diagnose(open_trace(run, step)).first
    assert first is not None
    assert (first.cause, first.operation.name) == ("operation", operation)


@pytest.mark.parametrize("program", [leaves_out_by_itself, updates_in_another_function])
def test_the_line_is_named_where_steps_measure_themselves(program: Program, tmp_path: Path) -> None:
    reason, hook = stopped(program, tmp_path, "device")
    assert f"log made the first NaN or infinity at {__file__}:{line_of('bad')} in " in reason
    assert "jax" not in hook.health["notes"]


@pytest.mark.parametrize("bad", ["batch.x (data)", "statistics.mean (state)", "params.w (parameter)"])
def test_a_bad_argument_is_named(bad: str, tmp_path: Path) -> None:
    reason, hook = stopped(functools.partial(reads_bad_arguments, bad), tmp_path)
    assert f"not finite; {bad} was not finite before the step; " in reason
    assert " read it first at " in reason
    first = diagnose(open_trace(open_run(hook.run_url), _BAD)).first
    assert first is not None
    assert first.tensor is not None
    assert (first.cause, first.tensor.name) == ("tensor", bad)


@pytest.mark.parametrize(
    ("program", "seconds", "sentence"),
    [
        (
            writes_to_its_batch,
            60,
            "it was not computed again: the program has written to an array that it passed",
        ),
        (donates_a_large_batch, 60, "it was not computed again: data y is lost, because the step donates it"),
        (
            computes_without_compiling,
            60,
            "it was not computed again: what made its gradients NaN or infinite ran",
        ),
        (
            reads_the_host,
            60,
            "not reproducible: computed again operation by operation and by the compiled step",
        ),
        (donates, 0, "it was not computed to its end: 0 seconds have passed after 0 operations"),
    ],
)
def test_what_cannot_be_named_is_said(
    program: Program, seconds: float, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_redo, "_LIMITS", ProgramLimits(seconds, 2**31))
    reason, _ = stopped(program, tmp_path)
    assert f"not finite; {sentence}" in reason


def test_a_healthy_program_is_the_same_to_the_bit(tmp_path: Path) -> None:
    results: list[Any] = []
    for options in ({"on_nonfinite": "stop"}, {"explain": True}):
        hook = Hook(tmp_path, run=f"r{len(results)}", **options)
        Recording(hook)
        with hook:
            results.append(trains(lambda _, y: y + 1))
        assert not hook.health["faults"]
        assert compiled_steps.plain_calls == []
    for first, second in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()
