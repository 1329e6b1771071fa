"""Programs that train with Keras, plain and recorded: ``python programs.py STORE RESULTS``, on the backend of the environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import watchstep
from tests.frameworks.recorded_programs import printed_by
from watchstep import CaptureConfig, StopTraining
from watchstep.keras import Recording

BACKEND = keras.backend.backend()
EVERY_STEP = CaptureConfig(overhead_budget=None, system=None)
BATCHES, BATCH = 8, 16
BAD = 3
"""The batch with a NaN."""

Wrap = Callable[[], list[Any]]
"""Begins to record, and returns callbacks."""


def data(*, bad: bool = False) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.standard_normal((BATCHES * BATCH, 6)).astype("float32")
    y = random.integers(0, 3, BATCHES * BATCH).astype("int32")
    if bad:
        x[BAD * BATCH] = np.nan
    return x, y


def layers() -> list[Any]:
    return [
        keras.layers.Dense(12, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(3, name="out", dtype="float32"),
    ]


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model: Any = None, **options: Any) -> Any:
    model = model or keras.Sequential([keras.Input((6,)), *layers()])
    optimizer = options.pop("optimizer", None) or keras.optimizers.Adam(0.01)
    model.compile(optimizer=optimizer, loss=loss(), **options)
    return model


def fitted(model: Any, callbacks: list[Any], *, bad: bool = False, **options: Any) -> Any:
    x, y = data(bad=bad)
    return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks, **options).history


def fit(record: Wrap) -> Any:
    x, y = data()
    model = compiled(metrics=["accuracy"])
    history = fitted(model, record(), epochs=2, validation_data=(x[:32], y[:32]))
    return history, weights_of(model)


def traced_before(record: Wrap) -> Any:
    """The model was trained before the recording began."""
    model = compiled()
    first = fitted(model, [])
    return first, fitted(model, record()), weights_of(model)


def jit_compile(record: Wrap) -> Any:
    model = compiled(jit_compile=True)
    return fitted(model, record()), weights_of(model)


def run_eagerly(record: Wrap) -> Any:
    model = compiled(run_eagerly=True)
    return fitted(model, record()), weights_of(model)


def several_steps(record: Wrap) -> Any:
    model = compiled(steps_per_execution=5)
    return fitted(model, record()), weights_of(model)


def overflow(record: Wrap) -> Any:
    """The scale of the loss is halved at the first steps, which are skipped."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0**19)
        model = compiled(optimizer=scaled)
        return fitted(model, record()), weights_of(model)
    finally:
        keras.mixed_precision.set_global_policy("float32")


class OwnStep(keras.Model):
    """A model with a training step of its own, as in Keras' guides."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = layers()

    def call(self, inputs: Any, training: bool = False) -> Any:
        for part in self.parts:
            inputs = part(inputs, training=training) if part.name == "norm" else part(inputs)
        return inputs

    def train_step(self, *arguments: Any) -> Any:
        steps: dict[str, Callable[..., Any]] = {
            "tensorflow": self._on_tensorflow,
            "jax": self._on_jax,
            "torch": self._on_torch,
        }
        return steps[BACKEND](*arguments)

    def _on_tensorflow(self, batch: Any) -> Any:
        import tensorflow as tf

        x, y = batch
        with tf.GradientTape() as tape:
            value = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": value}

    def _on_jax(self, state: Any, batch: Any) -> Any:
        import jax

        trainable, fixed, optimizer, metrics = state
        x, y = batch

        def value_of(trainable: Any, fixed: Any) -> Any:
            predicted, fixed = self.stateless_call(trainable, fixed, x, training=True)
            return self.compute_loss(x, y, predicted), fixed

        (value, fixed), gradients = jax.value_and_grad(value_of, has_aux=True)(trainable, fixed)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": value}, (trainable, fixed, optimizer, metrics)

    def _on_torch(self, batch: Any) -> Any:
        import torch

        x, y = batch
        self.zero_grad()
        value = self.compute_loss(y=y, y_pred=self(x, training=True))
        value.backward()
        variables = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([variable.value.grad for variable in variables], variables)
        return {"loss": value}


def own_step(record: Wrap) -> Any:
    model = OwnStep()
    model(np.zeros((1, 6), "float32"))
    return fitted(compiled(model), record()), weights_of(model)


def own_loop(record: Wrap) -> Any:
    """A loop of the program's own with a Keras optimizer."""
    model = keras.Sequential([keras.Input((6,)), *layers()])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    record()
    step = {"tensorflow": _tensorflow_step, "jax": _jax_step, "torch": _torch_step}[BACKEND](model, optimizer)
    x, y = data()
    losses = [
        float(step(x[start : start + BATCH], y[start : start + BATCH])) for start in range(0, len(x), BATCH)
    ]
    return losses, weights_of(model)


def _tensorflow_step(model: Any, optimizer: Any) -> Any:
    import tensorflow as tf

    compute = loss()

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = compute(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    return lambda x, y: step(tf.constant(x), tf.constant(y))


def _jax_step(model: Any, optimizer: Any) -> Any:
    import jax

    compute = loss()
    state = [
        [variable.value for variable in group]
        for group in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    ]

    def value_of(trainable: Any, fixed: Any, x: Any, y: Any) -> Any:
        predicted, fixed = model.stateless_call(trainable, fixed, x, training=True)
        return compute(y, predicted), fixed

    @jax.jit
    def update(state: Any, x: Any, y: Any) -> Any:
        trainable, fixed, inner = state
        (value, fixed), gradients = jax.value_and_grad(value_of, has_aux=True)(trainable, fixed, x, y)
        trainable, inner = optimizer.stateless_apply(inner, gradients, trainable)
        return value, [trainable, fixed, inner]

    def step(x: Any, y: Any) -> Any:
        nonlocal state
        value, state = update(state, x, y)
        for variable, new in zip(model.trainable_variables, state[0], strict=True):
            variable.assign(new)
        return value

    return step


def _torch_step(model: Any, optimizer: Any) -> Any:
    import torch

    compute = loss()

    def step(x: Any, y: Any) -> Any:
        model.zero_grad()
        value = compute(torch.from_numpy(y), model(torch.from_numpy(x), training=True))
        value.backward()
        variables = list(model.trainable_variables)
        with torch.no_grad():
            optimizer.apply([variable.value.grad for variable in variables], variables)
        return value.detach()

    return step


def planted(record: Wrap) -> Any:
    """A NaN in the fourth batch."""
    fitted(compiled(), record(), bad=True)


def planted_several(record: Wrap) -> Any:
    fitted(compiled(steps_per_execution=5), record(), bad=True)


def weights_of(model: Any) -> str:
    """All variables, bit by bit."""
    return "".join(np.asarray(weight).tobytes().hex() for weight in model.get_weights())


def saved(store: Path, record: Wrap) -> dict[str, Any]:
    """Save a model while it is recorded, and load it again."""
    model = compiled()
    fitted(model, record())
    model.save(store / "model.keras")
    loaded = keras.models.load_model(store / "model.keras")
    pairs = zip(model.optimizer.variables, loaded.optimizer.variables, strict=True)
    return {
        "variables": len(model.optimizer.variables),
        "equal": all(np.array_equal(a.numpy() if hasattr(a, "numpy") else a, b.numpy()) for a, b in pairs),
        "iterations": int(loaded.optimizer.iterations.numpy()),
    }


KINDS: dict[str, tuple[Callable[[Wrap], Any], frozenset[str]]] = {
    "fit": (fit, frozenset({"tensorflow", "jax", "torch"})),
    "traced_before": (traced_before, frozenset({"tensorflow", "jax"})),
    "jit_compile": (jit_compile, frozenset({"tensorflow"})),
    "run_eagerly": (run_eagerly, frozenset({"tensorflow", "jax"})),
    "several_steps": (several_steps, frozenset({"tensorflow", "jax"})),
    "own_step": (own_step, frozenset({"tensorflow", "jax", "torch"})),
    "own_loop": (own_loop, frozenset({"tensorflow", "jax", "torch"})),
    "overflow": (overflow, frozenset({"tensorflow", "jax", "torch"})),
}


def main(store: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"unmodified": printed_by(Path(__file__).with_name("unmodified.py"))}
    for kind, (program, backends) in KINDS.items():
        if BACKEND not in backends or (len(sys.argv) > 3 and kind not in sys.argv[3].split(",")):
            continue
        keras.utils.set_random_seed(0)
        plain = program(list)
        keras.utils.set_random_seed(0)
        with watchstep.Hook(store, run=kind, config=EVERY_STEP) as hook:
            recorded = program(lambda: [Recording(hook)])
        results[kind] = {"equal": plain == recorded, "faults": hook.health["faults"], "losses": recorded[0]}
    for kind, stops in (("planted", planted), ("planted_several", planted_several)):
        if BACKEND == "torch" and kind == "planted_several":
            continue
        keras.utils.set_random_seed(0)
        with watchstep.Hook(store, run=kind, config=EVERY_STEP, on_nonfinite="stop") as hook:
            try:
                stops(lambda: [Recording(hook)])
                results[kind] = {"stopped": None}
            except StopTraining as stop:
                results[kind] = {"stopped": stop.step, "faults": hook.health["faults"]}
    with watchstep.Hook(store, run="saved", config=EVERY_STEP) as hook:
        results["saved"] = saved(store, lambda: [Recording(hook)])
    return results


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(Path(sys.argv[1]))))
