"""Healthy and faulty trainings of each framework, recorded: ``python judged_programs.py FRAMEWORK STORE RESULTS``.

The training is the same for all frameworks with layers: a network of dense layers, updates by the gradient clipped to a norm, one batch per
step. Each fault is planted at a known step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep import CaptureConfig, Hook, StopTraining
from watchstep.capture.config import Cadence, Collection
from watchstep_rules import Guard

STEPS, BATCH, FEATURES = 80, 16, 8
FAULT = 50
"""The step of a fault that does not exist from the start."""

RATE = 0.1
SAVED = ("weights", "biases", "gradients", "activations", "outputs")
"""Collections whose tensors are saved in full."""

SAVED_EVERY = 40
"""Steps between full tensors."""

Arrays = NDArray[np.float32]


@dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
        sizes: number of units of each layer, the input's and the output's included.
        gain: standard deviation of a weight times the square root of its inputs.
        scale: factor of all inputs from `FAULT` on.
        poisoned: whether one input at `FAULT` is NaN.
        first_bias: bias of all units of the first layer.
    """

    sizes: tuple[int, ...] = (FEATURES, 16, 16, 1)
    gain: float = 1.4
    scale: float = 1.0
    poisoned: bool = False
    first_bias: float = 0.0

    @property
    def activation(self) -> str:
        """Name of the activation of the layers before the last one: many layers with sigmoids let gradients vanish."""
        return "sigmoid" if len(self.sizes) > 4 else "relu"

    def weights(self) -> list[tuple[Arrays, Arrays]]:
        """The initial kernel and bias of each layer."""
        random = np.random.default_rng(1)
        made = []
        for layer, (inputs, units) in enumerate(zip(self.sizes, self.sizes[1:], strict=False)):
            kernel = random.normal(size=(inputs, units)) * self.gain / np.sqrt(inputs)
            bias = np.full(units, self.first_bias if layer == 0 else 0.0)
            made.append((kernel.astype(np.float32), bias.astype(np.float32)))
        return made

    def batches(self) -> Iterator[tuple[Arrays, Arrays]]:
        """Inputs and labels of each step."""
        random = np.random.default_rng(2)
        for step in range(STEPS):
            x = random.normal(size=(BATCH, FEATURES)).astype(np.float32)
            y = (x[:, :1] + 0.5 * x[:, 1:2] > 0).astype(np.float32)
            if step >= FAULT:
                x = x * np.float32(self.scale)
            if self.poisoned and step == FAULT:
                x[0, 0] = np.nan
            yield x, y


TASKS = {
    "healthy": Task(),
    "nan": Task(poisoned=True),
    "exploding": Task(scale=1e4),
    "vanishing": Task(sizes=(FEATURES, 12, 12, 12, 12, 12, 1), gain=0.02),
    "dead": Task(first_bias=-100.0),
}


def train_pytorch(task: Task, hook: Hook) -> None:
    """A loop of PyTorch."""
    import torch
    from torch import nn

    layers: list[Any] = []
    for kernel, bias in task.weights():
        layer = nn.Linear(*kernel.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(kernel.T))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, nn.Sigmoid() if task.activation == "sigmoid" else nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    hook.watch(model, optimizer)
    for x, y in task.batches():
        loss = ((model(torch.from_numpy(x)) - torch.from_numpy(y)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        hook.log(loss=loss)


def train_jax(task: Task, hook: Hook) -> None:
    """A compiled step of JAX with optax."""
    import jax
    import jax.numpy as jnp
    import optax

    from watchstep.jax import Recording

    Recording(hook)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=RATE)
    )
    params = {
        f"dense_{layer}": {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}
        for layer, (kernel, bias) in enumerate(task.weights())
    }
    state = optimizer.init(params)
    activation = getattr(jax.nn, task.activation)

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        for layer in range(len(params)):
            x = x @ params[f"dense_{layer}"]["kernel"] + params[f"dense_{layer}"]["bias"]
            x = activation(x) if layer < len(params) - 1 else x
        return jnp.mean((x - y) ** 2)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    for x, y in task.batches():
        params, state, _ = step(params, state, x, y)
        hook.record(labels=y[:, 0].astype(np.int32))


def train_keras(task: Task, hook: Hook) -> None:
    """`fit` of Keras, with a validation at the end."""
    import keras

    from watchstep.keras import Recording

    weights = task.weights()
    last = len(weights) - 1
    layers = [
        keras.layers.Dense(kernel.shape[1], activation=task.activation if layer < last else None)
        for layer, (kernel, _) in enumerate(weights)
    ]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    for layer, values in zip(layers, weights, strict=True):
        layer.set_weights(values)
    model.compile(optimizer=keras.optimizers.SGD(RATE, global_clipnorm=1.0), loss="mse")
    parts = list(task.batches())
    x, y = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    model.fit(
        x,
        y,
        batch_size=BATCH,
        shuffle=False,
        verbose=0,
        validation_data=parts[0],
        callbacks=[Recording(hook)],
    )


def train_tensorflow(task: Task, hook: Hook) -> None:
    """A compiled step of TensorFlow with a gradient tape."""
    import tensorflow as tf

    from watchstep.tensorflow import Recording

    Recording(hook)
    variables = []
    for layer, (kernel, bias) in enumerate(task.weights()):
        variables += [
            tf.Variable(kernel, name=f"dense_{layer}/kernel"),
            tf.Variable(bias, name=f"dense_{layer}/bias"),
        ]
    rate = tf.Variable(RATE)
    activation = getattr(tf.nn, task.activation)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            for layer in range(0, len(variables), 2):
                x = x @ variables[layer] + variables[layer + 1]
                x = activation(x) if layer < len(variables) - 2 else x
            loss = tf.reduce_mean((x - y) ** 2)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 1.0)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(rate * gradient)

    for x, y in task.batches():
        hook.record(labels=y[:, 0].astype(np.int32))
        step(tf.constant(x), tf.constant(y))


ROUNDS = 40
JUMP = 25
"""The boosting round from which on the learning rate is far too high."""


def _table() -> tuple[Arrays, Arrays]:
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 5)).astype(np.float32)
    return x, (x[:, 0] * x[:, 1] + 0.3 * random.normal(size=300) > 0).astype(np.float32)


def _rate_of(kind: str) -> Callable[[int], float]:
    """Return the learning rate of each round."""
    return lambda number: 100.0 if kind == "rate" and number >= JUMP else 0.1


def _own_losses(kind: str) -> Iterator[float]:
    """Yield values of a loss of the program's own, round by round."""
    for number in range(ROUNDS):
        yield float("nan") if kind == "nan" and number >= JUMP else 1.0 / (number + 1)


def train_xgboost(kind: str, hook: Hook) -> None:
    """Boosting with XGBoost, with predictions, labels and SHAP values."""
    import xgboost

    from watchstep.xgboost import Recording

    x, y = _table()
    data, validation = xgboost.DMatrix(x[:200], y[:200]), xgboost.DMatrix(x[200:], y[200:])
    losses = _own_losses(kind)
    options: dict[str, Any] = {"evals": [(data, "train"), (validation, "valid")]}
    if kind == "nan":
        options = {"evals": [(data, "train")], "custom_metric": lambda *_: ("own", next(losses))}
    recording = Recording(
        hook, loss="own" if kind == "nan" else None, train_data=data, validation_data=validation, shap_rows=20
    )
    xgboost.train(
        {"objective": "binary:logistic", "max_depth": 2, "nthread": 1, "seed": 0},
        data,
        ROUNDS,
        callbacks=[xgboost.callback.LearningRateScheduler(_rate_of(kind)), recording],
        verbose_eval=False,
        **options,
    )


def train_lightgbm(kind: str, hook: Hook) -> None:
    """The same with LightGBM."""
    import lightgbm

    from watchstep.lightgbm import Recording

    x, y = _table()
    data = lightgbm.Dataset(x[:200], y[:200])
    losses = _own_losses(kind)
    options: dict[str, Any] = {"valid_sets": [data, lightgbm.Dataset(x[200:], y[200:], reference=data)]}
    if kind == "nan":
        options = {"valid_sets": [data], "feval": lambda *_: ("own", next(losses), False)}
    recording = Recording(
        hook,
        loss="own" if kind == "nan" else None,
        train_data=(x[:200], y[:200]),
        validation_data=(x[200:], y[200:]),
        shap_rows=20,
    )
    lightgbm.train(
        {"objective": "binary", "max_depth": 2, "num_threads": 1, "seed": 0, "verbose": -1},
        data,
        ROUNDS,
        callbacks=[lightgbm.reset_parameter(learning_rate=_rate_of(kind)), recording],
        **options,
    )


def _with_layers(train: Callable[[Task, Hook], None]) -> Callable[[str, Hook], None]:
    return lambda kind, hook: train(TASKS[kind], hook)


_LAYER_KINDS = ("healthy", "nan", "exploding", "vanishing", "dead")
_BOOSTING_KINDS = ("healthy", "nan", "rate")

PROGRAMS: dict[str, tuple[Callable[[str, Hook], None], tuple[str, ...]]] = {
    "pytorch": (_with_layers(train_pytorch), _LAYER_KINDS),
    "jax": (_with_layers(train_jax), _LAYER_KINDS),
    "keras-tensorflow": (_with_layers(train_keras), _LAYER_KINDS),
    "keras-jax": (_with_layers(train_keras), _LAYER_KINDS),
    "keras-torch": (_with_layers(train_keras), _LAYER_KINDS),
    "tensorflow": (_with_layers(train_tensorflow), _LAYER_KINDS),
    "xgboost": (train_xgboost, _BOOSTING_KINDS),
    "lightgbm": (train_lightgbm, _BOOSTING_KINDS),
}
"""The program of each framework, and the kinds of training that it has."""


def capture() -> CaptureConfig:
    """Everything at every step, and full tensors at some."""
    saved = Collection(tensors=Cadence(every=SAVED_EVERY))
    return CaptureConfig(
        collections={**CaptureConfig().collections, **dict.fromkeys(SAVED, saved)},
        overhead_budget=None,
        system=None,
        bundles=None,
        gradients="before_clipping",
    )


def main(framework: str, store: Path) -> dict[str, Any]:
    """Record all trainings of a framework; returns by training the faults of the recorder, and the step at which it was stopped."""
    train, kinds = PROGRAMS[framework]
    results: dict[str, Any] = {}
    for kind in kinds:
        with Hook(store, run=kind, config=capture()) as hook:
            train(kind, hook)
        results[kind] = {"faults": hook.health["faults"], "stopped": None}
    for kind in ("gate", "guard") if has_layers(framework) else ():
        hook = Hook(store, run=kind, config=capture(), on_nonfinite="stop" if kind == "gate" else "record")
        if kind == "guard":
            Guard().attach(hook)
        try:
            train("nan", hook)
            stopped = None
        except StopTraining as stop:
            stopped = stop.step
        hook.close()
        results[kind] = {"faults": hook.health["faults"], "stopped": stopped}
    return results


def has_layers(framework: str) -> bool:
    """Return whether a framework trains networks of layers."""
    return PROGRAMS[framework][1] == _LAYER_KINDS


if __name__ == "__main__":
    _, _, backend = sys.argv[1].partition("-")
    if backend:
        os.environ["KERAS_BACKEND"] = backend
    Path(sys.argv[3]).write_text(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
