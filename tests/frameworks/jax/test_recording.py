"""Recording of JAX programs: what is recorded, and that the programs compute what they compute without it."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_python

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.frameworks.jax import programs
from tests.frameworks.recorded_programs import values
from watchstep import CaptureConfig, Hook, StopTraining, open_run
from watchstep.jax import Recording, observed
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.config.rule_config import RuleConfig

ROOT = Path(__file__).parents[3]
EVERYTHING = CaptureConfig(overhead_budget=None)


@pytest.fixture(scope="module")
def plain_losses() -> dict[str, list[str]]:
    """Losses of all programs in a process without Watchstep."""
    output = run_python("-m", "tests.frameworks.jax.programs", cwd=ROOT)
    losses: dict[str, list[str]] = json.loads(output.splitlines()[-1])
    return losses


def recorded(store: Path, run: Any, **options: Any) -> tuple[Any, dict[str, Any], Any]:
    """Run a program with a recording; returns its result, the hook's health, and the run."""
    figures = options.pop("figures", None)
    hook = Hook(store, run="r", config=EVERYTHING, **options)
    Recording(hook, figures=figures)
    try:
        result = run()
    finally:
        hook.close()
    assert not hook.health["faults"]
    return result, hook.health, open_run(store / "default" / "r")


def described(run: Any, name: str) -> Any:
    """The description of a tensor."""
    return next(info for info in run.catalogue if info.name == name)


ROUNDS_OTHERWISE = {"with_nnx", "scanned_steps"}
"""XLA fuses what it computes into the update of a weight unless it is an output, too: the gradient of a layer with one output, and on some
processors (AMD EPYC) gradients in a scan."""

ONE_LOSS_A_STEP = {"plain", "scanned_steps", "scanned_layers", "with_nnx", "with_linen", "with_equinox"}

ON_DEVICE = ("plain", "accumulated", "with_nnx", "without_jit")


@pytest.mark.parametrize(
    ("name", "figures"),
    [*((name, "host") for name in programs.PROGRAMS), *((name, "device") for name in ON_DEVICE)],
)
def test_a_recorded_program_computes_the_same_losses_and_each_step_has_its_own(
    name: str, figures: str, plain_losses: dict[str, list[str]], tmp_path: Path
) -> None:
    losses, _, run = recorded(tmp_path, programs.PROGRAMS[name], figures=figures)
    if name in ROUNDS_OTHERWISE:
        numbers, plain = (list(map(float.fromhex, texts)) for texts in (losses, plain_losses[name]))
        assert numbers == pytest.approx(plain, rel=1e-5)
    else:
        assert losses == plain_losses[name]
    if name in ONE_LOSS_A_STEP:
        assert run.tensor("loss").steps() == list(range(programs.STEPS))
        means = values(run, "loss", "mean")
        assert [float(np.float32(mean)).hex() for mean in means] == losses


@pytest.mark.parametrize("figures", ["host", "device"])
def test_gradients_and_weights_are_those_of_the_step(figures: str, tmp_path: Path) -> None:
    _, _, run = recorded(tmp_path, programs.plain, figures=figures)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    params = programs.dense()
    state = optimizer.init(params)
    for step, batch in enumerate(programs.batches()):
        gradients = jax.grad(programs.loss_of)(params, batch)
        for name, leaf in (
            ("dense_1.kernel", params["dense_1"]["kernel"]),
            ("dense_1.kernel:gradient", gradients["dense_1"]["kernel"]),
        ):
            place = run.tensor(name).steps().index(step)
            assert values(run, name, "square_sum")[place] == pytest.approx(float((leaf**2).sum()), rel=1e-4)
            assert values(run, name, "max")[place] == pytest.approx(float(leaf.max()), rel=1e-5)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)


def test_names_and_roles_are_those_of_the_author(tmp_path: Path) -> None:
    _, _, run = recorded(tmp_path, programs.with_nnx)
    names = run.tensors()
    assert {"first.kernel", "first.bias", "second.kernel:gradient"} <= set(names)
    assert described(run, "first.bias").role == "bias"
    assert described(run, "second.kernel").order > described(run, "first.kernel").order


def test_layers_of_a_stack_have_rows_of_their_own(tmp_path: Path) -> None:
    _, _, run = recorded(tmp_path, programs.scanned_layers)
    names = set(run.tensors())
    assert {f"layers.{layer}.kernel:gradient" for layer in range(5)} <= names
    assert "layers.kernel" not in names
    assert described(run, "layers.3.kernel").shape == (4, 4)
    assert described(run, "layers.3.kernel").order > described(run, "layers.2.kernel").order
    first = jax.random.normal(jax.random.key(1), (5, 4, 4)) * 0.5
    recorded_max = [values(run, f"layers.{layer}.kernel", "max")[0] for layer in range(5)]
    assert recorded_max == pytest.approx([float(first[layer].max()) for layer in range(5)], rel=1e-6)


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    losses, _, run = recorded(tmp_path, programs.accumulated)
    assert run.tensor("loss").steps() == [0, 1]
    numbers = [float.fromhex(loss) for loss in losses]
    assert values(run, "loss", "mean") == pytest.approx(
        [sum(numbers[:3]) / 3, sum(numbers[3:]) / 3], rel=1e-6
    )
    assert values(run, "loss", "count") == [3, 3]
    assert values(run, "optimizer:learning_rate/0", "mean")[0] == pytest.approx(1e-2)
    params = programs.dense()
    gradients = [jax.grad(programs.loss_of)(params, batch) for batch in programs.batches()[:3]]
    mean = sum(gradient["dense_2"]["kernel"] for gradient in gradients) / 3
    assert values(run, "dense_2.kernel:gradient", "square_sum")[0] == pytest.approx(
        float((mean**2).sum()), rel=1e-4
    )


@pytest.mark.parametrize("name", ["population", "parallel", "exported"])
def test_health_says_what_is_not_observed(name: str, tmp_path: Path) -> None:
    _, health, run = recorded(tmp_path, programs.PROGRAMS[name])
    assert "not observed" in health["notes"]["jax"]
    assert run.tensors() == []


def test_nothing_is_compiled_again(tmp_path: Path) -> None:
    optimizer = optax.adam(1e-2)
    traces = 0

    def run() -> int:
        params = programs.dense()
        state = optimizer.init(params)

        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> Any:
            nonlocal traces
            traces += 1
            loss, gradients = jax.value_and_grad(programs.loss_of)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        for batch in programs.batches(200):
            params, state, _ = step(params, state, batch)
        size: int = step._cache_size()
        return size

    optimizer = observed(optimizer)
    size, _, _ = recorded(tmp_path, run)
    assert (size, traces) == (1, 1)


@pytest.mark.parametrize("figures", ["host", "device"])
def test_nan_is_found_at_its_step_and_stops(figures: str, tmp_path: Path) -> None:
    hook = Hook(tmp_path, run="r", on_nonfinite="stop")
    Recording(hook, figures=figures)  # type: ignore[arg-type]
    with pytest.raises(StopTraining) as stopped, hook:
        programs.plain(steps=12, poison=7)
    assert stopped.value.step == 7
    run = open_run(tmp_path / "default" / "r")
    series = run.tensor("dense_0.kernel:gradient")
    assert series.steps()[-1] == 7
    assert values(run, "dense_0.kernel:gradient", "nan")[-1] > 0
    assert values(run, "loss", "nan")[7] == 1
    assert values(run, "gradients:nonfinite_applied", "mean") == [0.0]


def test_a_scan_is_stopped_at_the_step_of_its_nan(tmp_path: Path) -> None:
    def run() -> None:
        optimizer = optax.adam(1e-2)
        params = programs.dense()

        @jax.jit
        def steps(carry: Any, batches: Any) -> Any:
            def body(carry: Any, batch: Any) -> Any:
                params, state = carry
                gradients = jax.grad(programs.loss_of)(params, batch)
                updates, state = optimizer.update(gradients, state, params)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(body, carry, batches)[0]

        carry = (params, optimizer.init(params))
        batches = programs.batches(50)
        batches[23, 0, 0] = np.nan
        for part in np.split(batches, 10):
            carry = steps(carry, part)

    hook = Hook(tmp_path, run="r", on_nonfinite="stop")
    Recording(hook)
    with pytest.raises(StopTraining) as stopped, hook:
        run()
    assert stopped.value.step == 23
    series = open_run(tmp_path / "default" / "r").tensor("dense_0.kernel:gradient")
    nans = dict(zip(series.steps(), series.statistics()["nan"].to_pylist(), strict=True))
    assert [step for step, nan in nans.items() if nan] == [23]


def test_entries_of_the_compilation_cache_are_written(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    try:
        jax.clear_caches()
        for figures in ("host", "device"):
            recorded(tmp_path / figures, programs.plain, figures=figures)
        names = [path.name for path in (tmp_path / "cache").iterdir()]
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    assert len([name for name in names if name.startswith("jit_step") and name.endswith("-cache")]) == 2


@pytest.mark.parametrize("is_chained", [False, True])
def test_skipped_updates_are_told_apart(is_chained: bool, tmp_path: Path) -> None:
    def run() -> None:
        optimizer = optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=3)
        if is_chained:
            optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
        params = programs.dense()
        state = optimizer.init(params)

        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> Any:
            gradients = jax.grad(programs.loss_of)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        batches = programs.batches(5)
        batches[2, 0, 0] = np.nan
        for batch in batches:
            params, state = step(params, state, batch)

    _, _, run_ = recorded(tmp_path, run, on_nonfinite="stop")
    series = run_.tensor("dense_0.kernel:gradient")
    assert series.steps() == list(range(5))
    assert [count > 0 for count in values(run_, "dense_0.kernel:gradient", "nan")] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert values(run_, "gradients:nonfinite_applied", "mean") == [0.0]
    (outcome,) = backtest(run_.rows(), [RuleConfig(rule="nan_or_inf")])
    assert not outcome.found


def in_parts(first: Any, others: Any) -> Any:
    """An optimizer that updates the first layer by one optimizer, and the others by another."""
    labels = {name: "first" if name == "dense_0" else "others" for name in programs.dense()}
    return optax.partition({"first": first, "others": others}, labels)


def skipping_micro_batches() -> Any:
    return optax.MultiSteps(optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite)


def trained_with_nan(create: Any, gradients_of: Any, steps: list[int]) -> Any:
    """Train with NaN in some batches, and return the weights.

    Args:
        create: creates the optimizer.
        gradients_of: what the program does to the gradients before the update, with the batch.
        steps: indices of these batches.
    """
    optimizer, data = create(), programs.batches(8)
    data[steps, 0, 0] = np.nan

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        _, gradients = jax.value_and_grad(programs.loss_of)(params, batch)
        updates, state = optimizer.update(gradients_of(gradients, batch), state, params)
        return optax.apply_updates(params, updates), state

    params = programs.dense()
    state = optimizer.init(params)
    for batch in data:
        params, state = step(params, state, batch)
    return params


def unchanged(gradients: Any, _: Any) -> Any:
    return gradients


def finite_in_the_first_layer(gradients: Any, _: Any) -> Any:
    return {**gradients, "dense_0": jax.tree_util.tree_map(jnp.ones_like, gradients["dense_0"])}


def zero_in_the_first_leaf(gradients: Any, _: Any) -> Any:
    first = {**gradients["dense_0"], "bias": jnp.zeros_like(gradients["dense_0"]["bias"])}
    return {**gradients, "dense_0": first}


def infinite(gradients: Any, batch: Any) -> Any:
    is_good = jnp.isfinite(batch).all()
    return jax.tree_util.tree_map(lambda leaf: jnp.where(is_good, leaf, jnp.inf), gradients)


LEAVE_OUT: dict[str, tuple[Any, Any]] = {
    "one of the parts": (
        lambda: in_parts(optax.apply_if_finite(optax.adam(0.1), 2), optax.apply_if_finite(optax.sgd(0.1), 2)),
        finite_in_the_first_layer,
    ),
    "micro-batches": (skipping_micro_batches, unchanged),
    "micro-batches of a transformation": (
        lambda: skipping_micro_batches().gradient_transformation(),
        unchanged,
    ),
    "micro-batches in a chain": (
        lambda: optax.chain(optax.scale(2.0), skipping_micro_batches().gradient_transformation()),
        unchanged,
    ),
}
"""Optimizers that leave out NaN by themselves, and what the program does to gradients."""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "figures"),
    [*((name, "host") for name in LEAVE_OUT), ("one of the parts", "device"), ("micro-batches", "device")],
)
def test_nan_that_an_optimizer_leaves_out_is_its_own(name: str, figures: str, tmp_path: Path) -> None:
    run = functools.partial(trained_with_nan, *LEAVE_OUT[name], [2, 5])
    expected = run()
    params, _, recorded_run = recorded(tmp_path, run, on_nonfinite="stop", figures=figures)
    jax.tree_util.tree_map(functools.partial(np.testing.assert_allclose, rtol=1e-5), params, expected)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree_util.tree_leaves(params))
    (outcome,) = backtest(recorded_run.rows(), [RuleConfig(rule="nan_or_inf")])
    assert not outcome.found
    if name == "micro-batches":
        assert len(recorded_run.tensor("loss").steps()) == 3  # of six finite batches
        assert all(map(math.isfinite, values(recorded_run, "loss", "mean")))


GIVE_UP: dict[str, tuple[Any, Any, int]] = {
    "a frozen parameter": (
        lambda: optax.apply_if_finite(optax.adam(0.1), 1),
        zero_in_the_first_leaf,
        3,
    ),
    "finite updates by infinity": (lambda: optax.apply_if_finite(optax.lion(0.1), 1), infinite, 3),
    "another part": (
        lambda: in_parts(optax.apply_if_finite(optax.adam(0.1), 9), optax.sgd(0.1)),
        unchanged,
        2,
    ),
    "another part, by a norm of all": (
        lambda: optax.chain(
            optax.clip_by_global_norm(1.0),
            in_parts(optax.sgd(0.1), optax.apply_if_finite(optax.adam(0.1), 9)),
        ),
        finite_in_the_first_layer,
        2,
    ),
    "micro-batches": (
        lambda: optax.MultiSteps(optax.adam(0.1), 2, should_skip_update_fn=lambda *_: (jnp.array(False), ())),
        unchanged,
        1,
    ),
}
"""Optimizers that apply NaN although a part of them may leave it out, what the program does to gradients, and the first step that applies it."""


@pytest.mark.ci
@pytest.mark.parametrize("name", GIVE_UP)
def test_nan_that_an_optimizer_applies_after_all_is_left_out(name: str, tmp_path: Path) -> None:
    create, gradients_of, step = GIVE_UP[name]
    run = functools.partial(trained_with_nan, create, gradients_of, [2, 3, 4])
    params, _, recorded_run = recorded(tmp_path, run, on_nonfinite="skip")
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree_util.tree_leaves(params))
    assert recorded_run.tensor("updates:skipped").steps()[0] == step


@pytest.mark.ci
@pytest.mark.parametrize("figures", ["host", "device"])
def test_nan_that_an_optimizer_applies_after_all_stops(figures: str, tmp_path: Path) -> None:
    create, gradients_of, step = GIVE_UP["a frozen parameter"]
    with pytest.raises(StopTraining) as stopped:
        recorded(
            tmp_path,
            lambda: trained_with_nan(create, gradients_of, [2, 3, 4]),
            on_nonfinite="stop",
            figures=figures,
        )
    assert stopped.value.step == step


@pytest.mark.parametrize("figures", ["host", "device"])
def test_updates_by_nan_are_left_out_if_the_policy_says_so(figures: str, tmp_path: Path) -> None:
    losses, health, run = recorded(
        tmp_path, lambda: programs.plain(steps=12, poison=4), on_nonfinite="skip", figures=figures
    )
    numbers = list(map(float.fromhex, losses))
    assert [step for step, number in enumerate(numbers) if math.isnan(number)] == [4]
    assert values(run, "updates:skipped", "mean") == [1.0, 0.0]
    assert run.tensor("updates:skipped").steps() == [4, 5]
    assert health["counts"]["skipped_updates"] == 1
    weights = run.tensor("dense_1.kernel").steps()
    sums = dict(zip(weights, values(run, "dense_1.kernel", "square_sum"), strict=True))
    if figures == "host":
        assert sums[4] == sums[5] != sums[6]


def test_the_policy_stops_after_skips_in_a_row(tmp_path: Path) -> None:
    def run() -> None:
        optimizer = optax.sgd(0.1)
        params = programs.dense()
        state = optimizer.init(params)

        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> Any:
            gradients = jax.grad(programs.loss_of)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        data = programs.batches(12)
        data[[2, 5, 6, 7], 0, 0] = np.nan
        for batch in data:
            params, state = step(params, state, batch)

    hook = Hook(tmp_path, run="r", on_nonfinite="skip:2")
    Recording(hook)
    with pytest.raises(StopTraining) as stopped, hook:
        run()
    assert stopped.value.step == 7
    assert "after 2 skipped updates" in stopped.value.request.reason


def test_the_state_of_a_stopped_program_is_the_one_before_the_update(tmp_path: Path) -> None:
    state_of: list[Any] = []

    def run() -> None:
        optimizer = optax.adam(0.1)
        params = programs.dense()
        state_of[:] = [params, optimizer.init(params)]

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any, batch: Any) -> Any:
            gradients = jax.grad(programs.loss_of)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        data = programs.batches(12)
        data[7, 0, 0] = np.nan
        for batch in data:
            state_of[:] = step(*state_of, batch)

    hook = Hook(tmp_path, run="r", on_nonfinite="stop")
    Recording(hook)
    with pytest.raises(StopTraining), hook:
        run()
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree_util.tree_leaves(state_of))
    assert int(state_of[1][0].count) == 7


def test_a_compiled_function_behaves_as_that_of_jax(tmp_path: Path) -> None:
    hook = Hook(tmp_path, run="r")
    Recording(hook)

    class Model:
        @jax.jit
        def scaled(self: Any, factor: Any) -> Any:
            """Scale."""
            return factor * 2.0

    jax.tree_util.register_static(Model)
    double = jax.jit(lambda number, times=1: number * 2 * times, static_argnames="times")
    assert float(Model().scaled(3.0)) == 6.0
    assert Model.scaled.__doc__ == "Scale."
    assert float(double(3.0, times=2)) == 12.0
    assert float(jax.jit(lambda number: double(number) + 1)(3.0)) == 7.0
    assert float(jax.grad(double)(3.0)) == 2.0
    assert double.lower(3.0).compile()(3.0) == 6.0
    assert jax.vmap(double)(jnp.ones(3)).shape == (3,)
    assert double.eval_shape(3.0).shape == ()
    hook.close()


def test_an_unmodified_program_is_recorded(plain_losses: dict[str, list[str]], tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.frameworks.jax import programs\n"
        "print(programs.with_linen()[-1])\n",
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "watchstep.command",
        "run",
        "--store",
        str(tmp_path / "store"),
        "--run",
        "r",
    ]
    child = subprocess.run(
        [*command, "--", sys.executable, program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert child.stdout == f"{plain_losses['with_linen'][-1]}\n"
    run = open_run(tmp_path / "store" / "default" / "r")
    assert run.tensor("loss").steps() == list(range(programs.STEPS))
    assert "Dense_1.kernel:gradient" in run.tensors()


def test_numbers_of_the_program_belong_to_the_step_after_which_they_are_logged(tmp_path: Path) -> None:
    hook = Hook(tmp_path, run="r", config=EVERYTHING)
    Recording(hook)
    optimizer = optax.sgd(0.1)
    params = programs.dense()
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(programs.loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    for number, batch in enumerate(programs.batches()):
        params, state, loss = step(params, state, batch)
        hook.log(loss=loss, number=jnp.float32(number))
    hook.close()
    run = open_run(tmp_path / "default" / "r")
    assert run.tensor("number").steps() == list(range(programs.STEPS))
    assert values(run, "number", "mean") == list(range(programs.STEPS))
    assert run.tensor("loss").steps() == list(range(programs.STEPS))
    assert not described(run, "loss").derived


def test_a_batch_with_nan_is_left_out_of_an_accumulation(tmp_path: Path) -> None:
    def run() -> Any:
        optimizer = optax.MultiSteps(optax.sgd(0.1), 2)
        params = programs.dense()
        state = optimizer.init(params)

        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> Any:
            gradients = jax.grad(programs.loss_of)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        data = programs.batches(7)
        data[3, 0, 0] = np.nan
        for batch in data:
            params, state = step(params, state, batch)
        return params, int(state.gradient_step)

    (params, updates), health, recorded_run = recorded(tmp_path, run, on_nonfinite="skip")
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree_util.tree_leaves(params))
    assert updates == 3  # of six finite batches
    assert health["counts"]["skipped_updates"] == 1
    assert len(recorded_run.tensor("dense_0.kernel:gradient").steps()) == 4


@pytest.mark.parametrize("name", ["plain", "scanned_steps"])
def test_a_requested_bundle_is_of_a_call_with_one_step(name: str, tmp_path: Path) -> None:
    hook = Hook(tmp_path, run="r", config=EVERYTHING)
    Recording(hook)
    hook.bundle()
    programs.PROGRAMS[name]()
    hook.close()
    assert hook.health["counts"].get("bundles", 0) == (1 if name == "plain" else 0)
