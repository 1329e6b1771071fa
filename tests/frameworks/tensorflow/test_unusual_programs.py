"""Functions that a program saves or traces itself, and gradients that are no updates, recorded with gradient tapes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import watchstep
from watchstep import CaptureConfig

pytest.importorskip("tensorflow", reason="TENSORFLOW IS NOT INSTALLED: its adapter is not proven by this run")
import tensorflow as tf

EVERY_STEP = CaptureConfig(overhead_budget=None, system=None)


class SavedNetwork(tf.Module):
    """A module that is saved with its training step, as for training on devices."""

    def __init__(self) -> None:
        super().__init__(name="saved")
        random = np.random.default_rng(0)
        self.kernel = tf.Variable(random.standard_normal((6, 1)).astype("float32"), name="kernel")
        self.rate = tf.Variable(0.1, trainable=False)

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float32)])
    def update(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ self.kernel - 1.0) ** 2)
        self.kernel.assign_sub(self.rate * tape.gradient(loss, self.kernel))
        return {"loss": loss}

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float32)])
    def update_twice(self, x: Any) -> Any:
        self.update(x)
        return self.update(x)


def inputs(count: int = 4) -> list[Any]:
    random = np.random.default_rng(1)
    return [tf.constant(random.standard_normal((8, 6)).astype("float32")) for _ in range(count)]


def record(hook: Any) -> None:
    from watchstep.tensorflow import Recording

    Recording(hook)


@pytest.mark.parametrize("method", ["update", "update_twice"])
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_function_is_saved_and_loaded_as_without_recording(
    tmp_path: Path, method: str, is_closed: bool
) -> None:
    results = []
    for is_recorded in (False, True):
        network = SavedNetwork()
        function = getattr(network, method)
        folder = str(tmp_path / f"{is_recorded}")
        hook = watchstep.Hook(tmp_path / "runs", run="saved", config=EVERY_STEP) if is_recorded else None
        if hook is not None:
            record(hook)
        losses = [float(function(x)["loss"]) for x in inputs()]
        traces = [function.experimental_get_tracing_count()]
        if hook is not None and is_closed:
            hook.close()
            gc.collect()
        concrete = function.get_concrete_function()
        tf.saved_model.save(network, folder, signatures={"train": concrete})
        losses += [float(function(x)["loss"]) for x in inputs()]
        traces.append(function.experimental_get_tracing_count())
        if hook is not None:
            hook.close()
        loaded = tf.saved_model.load(folder)
        losses += [float(loaded.signatures["train"](x)["loss"]) for x in inputs()]
        losses += [float(getattr(loaded, method)(x)["loss"]) for x in inputs()]
        names = [name for name, _ in tf.train.list_variables(f"{folder}/variables/variables")]
        results.append((losses, names, traces, loaded.kernel.numpy().tobytes()))
        if hook is not None:
            assert hook.health["faults"] == {}
    assert results[0] == results[1]


def test_a_function_that_is_traced_before_its_first_call_is_recorded(tmp_path: Path) -> None:
    with watchstep.Hook(tmp_path, run="traced", config=EVERY_STEP) as hook:
        record(hook)
        network = SavedNetwork()
        network.update.get_concrete_function()
        losses = [float(network.update(x)["loss"]) for x in inputs()]
    table = watchstep.open_run(hook.run_url).tensor("loss").statistics().to_pydict()
    assert dict(zip(table["step"], table["mean"], strict=True)) == pytest.approx(dict(enumerate(losses)))


@pytest.mark.parametrize("methods", [["update", "update_twice"], ["update_twice", "update"]])
def test_functions_of_which_one_calls_the_other_are_both_recorded(tmp_path: Path, methods: list[str]) -> None:
    """The inner one has one trace, of the first call of either."""
    network, losses, step = SavedNetwork(), {}, -1
    with watchstep.Hook(tmp_path, run="shared", config=EVERY_STEP) as hook:
        record(hook)
        for method in methods:
            for x in inputs():
                step += 2 if method == "update_twice" else 1
                losses[step] = float(getattr(network, method)(x)["loss"])
    run = watchstep.open_run(hook.run_url)
    table = run.tensor("loss").statistics().to_pydict()
    recorded = dict(zip(table["step"], table["mean"], strict=True))
    assert run.steps("train") == list(range(step + 1))
    assert {step: recorded[step] for step in losses} == pytest.approx(losses)


def test_jacobians_and_gradients_of_examples_are_no_steps(tmp_path: Path) -> None:
    network = SavedNetwork()

    @tf.function
    def curvature(x: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean((x @ network.kernel - 1.0) ** 2)
            gradient = inner.gradient(loss, network.kernel)
        return outer.jacobian(gradient, network.kernel)

    @tf.function
    def of_examples(x: Any) -> Any:
        def of_example(row: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((row[None] @ network.kernel - 1.0) ** 2)
            return tape.gradient(loss, network.kernel)

        return tf.vectorized_map(of_example, x)

    with watchstep.Hook(tmp_path, run="parts", config=EVERY_STEP) as hook:
        record(hook)
        losses = []
        for x in inputs():
            curvature(x)
            of_examples(x)
            losses.append(float(network.update(x)["loss"]))
    table = watchstep.open_run(hook.run_url).tensor("loss").statistics().to_pydict()
    assert dict(zip(table["step"], table["mean"], strict=True)) == pytest.approx(dict(enumerate(losses)))
    assert hook.health["faults"] == {}


def test_gradients_in_a_data_set_add_nothing_to_it_and_are_reported(tmp_path: Path) -> None:
    network = SavedNetwork()

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ network.kernel - 1.0) ** 2)
        return tape.gradient(loss, network.kernel)

    plain = [row.numpy().tobytes() for row in tf.data.Dataset.from_tensors(inputs()[0]).map(gradient)]
    with watchstep.Hook(tmp_path, run="data", config=EVERY_STEP) as hook:
        record(hook)
        recorded = [row.numpy().tobytes() for row in tf.data.Dataset.from_tensors(inputs()[0]).map(gradient)]
    assert plain == recorded
    assert hook.health["faults"] == {}
    assert "data set" in hook.health["notes"]["tensorflow"]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_each_of_many_trainings_counts_steps_and_none_keeps_its_variables(
    tmp_path: Path, is_compiled: bool
) -> None:
    trainings, variables = 18, []
    with watchstep.Hook(tmp_path, run="search", config=EVERY_STEP) as hook:
        for _ in range(trainings):
            record(hook)
            kernel = tf.Variable(tf.ones((6, 1)), name="kernel")
            variables.append(weakref.ref(kernel))

            def update(x: Any, kernel: Any = kernel) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((x @ kernel - 1.0) ** 2)
                kernel.assign_sub(0.1 * tape.gradient(loss, kernel))

            function = tf.function(update) if is_compiled else update
            for x in inputs(2):
                function(x)
            del kernel, update, function
            gc.collect()
            assert sum(reference() is not None for reference in variables) == 0
    run = watchstep.open_run(hook.run_url)
    assert run.steps("train") == list(range(2 * trainings))
    assert set(run.tensors()) >= {"kernel:gradient", "loss"}
    assert hook.health["faults"] == {}


@pytest.mark.parametrize("dtype", ["complex64", "float64"])
def test_only_nan_and_infinity_stop_a_graph_of_other_numbers(tmp_path: Path, dtype: str) -> None:
    """The sum of large float64 numbers is more than float32 represents; complex numbers have two parts."""
    hook = watchstep.Hook(tmp_path, run="r", config=EVERY_STEP, on_nonfinite="stop")
    record(hook)
    kernel = tf.Variable(tf.ones((4,), dtype), name="kernel")

    @tf.function
    def update_twice(scale: Any) -> None:
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.math.real(tf.reduce_sum(kernel * scale))
            kernel.assign(kernel - tf.cast(1e-42, dtype) * tape.gradient(loss, kernel))

    large = 1e40 if dtype == "float64" else 1.0
    scales = [tf.cast(tf.constant(scale, tf.float64), dtype) for scale in (large, large, np.nan)]
    for scale in scales[:2]:
        update_twice(scale)
    with pytest.raises(watchstep.StopTraining):
        update_twice(scales[2])
    hook.close()
    assert hook.health["faults"] == {}
