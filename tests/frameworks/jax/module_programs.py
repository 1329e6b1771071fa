"""Trainings of a network with three layers, in Flax NNX, Flax linen and Equinox, as their authors write them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

STEPS = 8
FEATURES, UNITS, OUTPUTS = 4, 16, 3

NAMES = {
    "nnx": ("first", "second", "third"),
    "linen": ("first", "second", "third"),
    "equinox": ("layers.0", "layers.1", "layers.2"),
}
"""Paths of the layers."""

Losses = list[str]


def batches(steps: int = STEPS) -> Any:
    """Batches of shape (steps, 32, 4)."""
    return np.random.default_rng(0).normal(size=(steps, 32, FEATURES)).astype(np.float32)


def hexadecimal(losses: Any) -> Losses:
    return [float(loss).hex() for loss in losses]


def loss_of(output: Any) -> Any:
    return jnp.mean((output - 1.0) ** 2)


class NnxNetwork(nnx.Module):
    """Layers with names."""

    def __init__(self, rngs: Any, bias: float) -> None:
        self.first = nnx.Linear(FEATURES, UNITS, bias_init=nnx.initializers.constant(bias), rngs=rngs)
        self.second = nnx.Linear(UNITS, UNITS, rngs=rngs)
        self.third = nnx.Linear(UNITS, OUTPUTS, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        return self.third(nnx.relu(self.second(nnx.relu(self.first(batch)))))


def train_nnx(steps: int = STEPS, bias: float = 0.0) -> Losses:
    model = NnxNetwork(nnx.Rngs(0), bias)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda model: loss_of(model(batch)))(model)
        optimizer.update(model, gradients)
        return loss

    return hexadecimal([step(model, optimizer, batch) for batch in batches(steps)])


def scan_nnx(steps: int = STEPS) -> Losses:
    model = NnxNetwork(nnx.Rngs(0), 0.0)
    optimizer = optax.sgd(0.1)
    graph, params = nnx.split(model)

    @jax.jit
    def several(carry: Any, batches: Any) -> Any:
        def body(carry: Any, batch: Any) -> Any:
            params, state = carry
            loss, gradients = jax.value_and_grad(lambda params: loss_of(nnx.merge(graph, params)(batch)))(
                params
            )
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(body, carry, batches)

    return _scanned(several, (params, optimizer.init(params)), steps)


def _scanned(several: Any, carry: Any, steps: int) -> Losses:
    losses: list[Any] = []
    for part in np.split(batches(steps), 2):
        carry, found = several(carry, part)
        losses.extend(found)
    return hexadecimal(losses)


class LinenNetwork(flax.linen.Module):
    """Layers with names."""

    bias: float = 0.0

    @flax.linen.compact
    def __call__(self, batch: Any) -> Any:
        constant = flax.linen.initializers.constant(self.bias)
        batch = flax.linen.relu(flax.linen.Dense(UNITS, bias_init=constant, name="first")(batch))
        batch = flax.linen.relu(flax.linen.Dense(UNITS, name="second")(batch))
        return flax.linen.Dense(OUTPUTS, name="third")(batch)


def train_linen(steps: int = STEPS, bias: float = 0.0) -> Losses:
    network = LinenNetwork(bias)
    params = network.init(jax.random.key(0), batches()[0])
    state = TrainState.create(apply_fn=network.apply, params=params, tx=optax.sgd(0.1))

    @functools.partial(jax.jit, donate_argnums=(0,))
    def step(state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda params: loss_of(state.apply_fn(params, batch)))(
            state.params
        )
        return state.apply_gradients(grads=gradients), loss

    losses = []
    for batch in batches(steps):
        state, loss = step(state, batch)
        losses.append(loss)
    return hexadecimal(losses)


def scan_linen(steps: int = STEPS) -> Losses:
    network = LinenNetwork()
    params = network.init(jax.random.key(0), batches()[0])
    state = TrainState.create(apply_fn=network.apply, params=params, tx=optax.sgd(0.1))

    @jax.jit
    def several(state: Any, batches: Any) -> Any:
        def body(state: Any, batch: Any) -> Any:
            loss, gradients = jax.value_and_grad(lambda params: loss_of(state.apply_fn(params, batch)))(
                state.params
            )
            return state.apply_gradients(grads=gradients), loss

        return jax.lax.scan(body, state, batches)

    return _scanned(several, state, steps)


def equinox_network(bias: float = 0.0) -> Any:
    model = equinox.nn.MLP(FEATURES, OUTPUTS, UNITS, 2, key=jax.random.key(0))
    return equinox.tree_at(
        lambda model: model.layers[0].bias, model, replace_fn=lambda leaf: jnp.full_like(leaf, bias)
    )


def train_equinox(steps: int = STEPS, bias: float = 0.0) -> Losses:
    model = equinox_network(bias)
    optimizer = optax.sgd(0.1)
    state = optimizer.init(equinox.filter(model, equinox.is_array))

    @equinox.filter_jit
    def step(model: Any, state: Any, batch: Any) -> Any:
        loss, gradients = equinox.filter_value_and_grad(lambda model: loss_of(jax.vmap(model)(batch)))(model)
        updates, state = optimizer.update(gradients, state, equinox.filter(model, equinox.is_array))
        return equinox.apply_updates(model, updates), state, loss

    losses = []
    for batch in batches(steps):
        model, state, loss = step(model, state, batch)
        losses.append(loss)
    return hexadecimal(losses)


def scan_equinox(steps: int = STEPS) -> Losses:
    params, static = equinox.partition(equinox_network(), equinox.is_array)
    optimizer = optax.sgd(0.1)

    @jax.jit
    def several(carry: Any, batches: Any) -> Any:
        def body(carry: Any, batch: Any) -> Any:
            params, state = carry

            def loss_of_params(params: Any) -> Any:
                return loss_of(jax.vmap(equinox.combine(params, static))(batch))

            loss, gradients = jax.value_and_grad(loss_of_params)(params)
            updates, state = optimizer.update(gradients, state, params)
            return (equinox.apply_updates(params, updates), state), loss

        return jax.lax.scan(body, carry, batches)

    return _scanned(several, (params, optimizer.init(params)), steps)


TRAIN: dict[str, Callable[..., Losses]] = {
    "nnx": train_nnx,
    "linen": train_linen,
    "equinox": train_equinox,
}
SCAN: dict[str, Callable[..., Losses]] = {"nnx": scan_nnx, "linen": scan_linen, "equinox": scan_equinox}
