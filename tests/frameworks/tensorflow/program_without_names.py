"""Trainings of Keras and TensorFlow without one of the names that are looked up: ``python -m tests.frameworks.tensorflow.program_without_names``."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import numpy as np
import tensorflow as tf

from tests.missing_names import (
    COMPLETE,
    WITHOUT_MODULE,
    WITHOUT_WATCHSTEP,
    print_results,
    recorded,
    remove,
)
from watchstep.keras.internals import keras_names
from watchstep.tensorflow.internals import tensorflow_names

X = np.linspace(-1.0, 1.0, 16, dtype=np.float32).reshape(8, 2)
Y = np.ones((8, 1), np.float32)
ON_JAX = {"scaling_stateless_apply", "trainable_variables", "jax_compiler", "is_state_kept"}
"""Names that Keras has on JAX only, or that recording uses there with each version of Keras."""


def _keras(backend: str) -> Any:
    if os.environ["KERAS_BACKEND"] != backend:
        os.environ["KERAS_BACKEND"] = backend
        for name in list(sys.modules):
            if name.startswith(("keras", "watchstep.keras")):
                del sys.modules[name]
    import keras

    return keras


def _fitted(callbacks: Any, backend: str) -> dict[str, Any]:
    """Losses of `fit` without and with dynamic loss scaling, and of an evaluation."""
    keras = _keras(backend)
    result = {}
    for name in ("plain", "scaled"):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name=name)])
        optimizer = keras.optimizers.SGD(0.1)
        scaled = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
        model.compile(optimizer=scaled if name == "scaled" else optimizer, loss="mse")
        fitted = model.fit(X, Y, batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
        result[name] = [float(loss).hex() for loss in fitted.history["loss"]]
    result["evaluated"] = [float(model.evaluate(X, Y, verbose=0)).hex()]
    return result


def _taped() -> dict[str, Any]:
    """Losses of loops with tapes, in eager code and in a function."""
    losses: dict[str, Any] = {}
    for name in ("eager", "graph"):
        variable = tf.Variable(np.ones((2, 1), np.float32), name=name)

        def step(variable: Any = variable) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.constant(X) @ variable - 1.0) ** 2)
            variable.assign_sub(0.1 * tape.gradient(loss, [variable])[0])
            return loss

        called: Any = tf.function(step) if name == "graph" else step
        losses[name] = [float(called()).hex() for _ in range(2)]
        if name == "graph":
            called.get_concrete_function()
    return losses


def _start_keras(hook: Any) -> Any:
    from watchstep.keras import Recording

    return [Recording(hook)]


def _start_tapes(hook: Any) -> None:
    from watchstep.tensorflow import Recording

    Recording(hook)


def _break(package: str) -> None:
    """Let the import of a package's recording raise."""
    del sys.modules[package]
    sys.modules[f"{package}.recording"] = None  # type: ignore[assignment]


def _run(key: str) -> dict[str, Any]:
    framework, _, name = key.partition(":")
    if framework == "TensorFlow":
        if name == WITHOUT_WATCHSTEP:
            return {"result": _taped()}
        if name == WITHOUT_MODULE:
            _break("watchstep.tensorflow")
        elif name != COMPLETE:
            remove(tensorflow_names, name)
        return recorded(_start_tapes, lambda _: _taped())
    backend = "jax" if name in ON_JAX or framework == "Keras on jax" else "tensorflow"
    keras = _keras(backend)
    assert keras.backend.backend() == backend
    if name == WITHOUT_WATCHSTEP:
        return {"result": _fitted([], backend)}
    from watchstep.keras.internals import keras_names as names

    if name == WITHOUT_MODULE:
        _break("watchstep.keras")
    elif name != COMPLETE:
        remove(names, name)
    return recorded(_start_keras, lambda callbacks: _fitted(callbacks, backend))


def _keys() -> list[str]:
    tables = {
        "TensorFlow": tensorflow_names.table,
        "Keras": keras_names.table,
        "Keras on jax": {},
    }
    return [
        f"{name}:{key}"
        for name, table in tables.items()
        for key in (WITHOUT_WATCHSTEP, COMPLETE, *([WITHOUT_MODULE] if table else []), *table)
    ]


if __name__ == "__main__":
    print_results(sys.argv[1:] or _keys(), _run)
