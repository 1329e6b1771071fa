"""Training programs of JAX, as their authors write them: each returns the losses of its steps as hexadecimal numbers.

``python -m tests.frameworks.jax.programs`` runs all of them and prints the losses.
"""

from __future__ import annotations

import functools
import json
import sys
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

STEPS = 6


def batches(steps: int = STEPS) -> Any:
    """Batches of shape (steps, 8, 4)."""
    return np.random.default_rng(0).normal(size=(steps, 8, 4)).astype(np.float32)


def hexadecimal(losses: Any) -> list[str]:
    return [float(loss).hex() for loss in losses]


def dense(seed: int = 0) -> Any:
    key = jax.random.key(seed)
    sizes = ((4, 16), (16, 16), (16, 1))
    return {
        f"dense_{number}": {
            "kernel": jax.random.normal(jax.random.fold_in(key, number), shape) * 0.3,
            "bias": jnp.zeros(shape[1]),
        }
        for number, shape in enumerate(sizes)
    }


def loss_of(params: Any, batch: Any) -> Any:
    for number in range(3):
        layer = params[f"dense_{number}"]
        batch = jnp.tanh(batch @ layer["kernel"] + layer["bias"])
    return jnp.mean((batch - 1.0) ** 2)


def plain(steps: int = STEPS, poison: int | None = None) -> list[str]:
    """A chain of transformations, and donated state."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    params = dense()
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    data = batches(steps)
    if poison is not None:
        data[poison, 0, 0] = np.nan
    for batch in data:
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    return hexadecimal(losses)


def scanned_steps() -> list[str]:
    """Several steps in one dispatch."""
    optimizer = optax.adam(1e-2)
    params = dense()
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0,))
    def steps(carry: Any, batches: Any) -> Any:
        def body(carry: Any, batch: Any) -> Any:
            params, state = carry
            loss, gradients = jax.value_and_grad(loss_of)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(body, carry, batches)

    losses: list[Any] = []
    carry = (params, state)
    for part in np.split(batches(), 2):
        carry, found = steps(carry, part)
        losses.extend(found)
    return hexadecimal(losses)


def scanned_layers() -> list[str]:
    """A stack of layers under a scan, with recomputation."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    key = jax.random.key(1)
    params = {
        "layers": {"kernel": jax.random.normal(key, (5, 4, 4)) * 0.5, "bias": jnp.zeros((5, 4))},
        "head": jax.random.normal(key, (4, 1)),
    }
    state = optimizer.init(params)

    def loss_of(params: Any, batch: Any) -> Any:
        @jax.checkpoint
        def layer(batch: Any, layer: Any) -> Any:
            return jnp.tanh(batch @ layer["kernel"] + layer["bias"]), None

        batch, _ = jax.lax.scan(layer, batch, params["layers"])
        return jnp.mean((batch @ params["head"]) ** 2)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for batch in batches():
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    return hexadecimal(losses)


def accumulated() -> list[str]:
    """An update for every three batches, and injected hyperparameters."""
    schedule = optax.linear_schedule(1e-2, 1e-3, 10)
    optimizer = optax.MultiSteps(optax.inject_hyperparams(optax.adam)(learning_rate=schedule), 3)
    params = dense()
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for batch in batches():
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    return hexadecimal(losses)


def with_nnx() -> list[str]:
    """Flax NNX."""

    class Network(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(4, 16, rngs=rngs)
            self.second = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, batch: Any) -> Any:
            return self.second(nnx.relu(self.first(batch)))

    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(batch) - 1.0) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    return hexadecimal([step(model, optimizer, batch) for batch in batches()])


def with_linen() -> list[str]:
    """Flax linen and its train state."""

    class Network(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, batch: Any) -> Any:
            return flax.linen.Dense(1)(flax.linen.relu(flax.linen.Dense(16)(batch)))

    network = Network()
    params = network.init(jax.random.key(0), batches()[0])
    state = TrainState.create(apply_fn=network.apply, params=params, tx=optax.adam(1e-2))

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return jnp.mean((state.apply_fn(params, batch) - 1.0) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    losses = []
    for batch in batches():
        state, loss = step(state, batch)
        losses.append(loss)
    return hexadecimal(losses)


def with_equinox() -> list[str]:
    """Equinox."""
    model = equinox.nn.MLP(4, 1, 16, 2, key=jax.random.key(0))
    optimizer = optax.adam(1e-2)
    state = optimizer.init(equinox.filter(model, equinox.is_array))

    @equinox.filter_jit
    def step(model: Any, state: Any, batch: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return jnp.mean((jax.vmap(model)(batch) - 1.0) ** 2)

        loss, gradients = equinox.filter_value_and_grad(loss_of)(model)
        updates, state = optimizer.update(gradients, state, equinox.filter(model, equinox.is_array))
        return equinox.apply_updates(model, updates), state, loss

    losses = []
    for batch in batches():
        model, state, loss = step(model, state, batch)
        losses.append(loss)
    return hexadecimal(losses)


def without_jit() -> list[str]:
    """Only the gradient function is compiled."""
    optimizer = optax.adam(1e-2)
    params = dense()
    state = optimizer.init(params)
    differentiate = jax.jit(jax.value_and_grad(loss_of))
    losses = []
    for batch in batches():
        loss, gradients = differentiate(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(loss)
    return hexadecimal(losses)


def population() -> list[str]:
    """Two trainings under vmap."""
    optimizer = optax.sgd(0.1)
    params = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), dense(0), dense(1))
    state = jax.vmap(optimizer.init)(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        def one(params: Any, state: Any) -> Any:
            loss, gradients = jax.value_and_grad(loss_of)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        return jax.vmap(one)(params, state)

    losses = []
    for batch in batches():
        params, state, loss = step(params, state, batch)
        losses.append(loss.sum())
    return hexadecimal(losses)


def parallel() -> list[str]:
    """One training on each device under pmap."""
    optimizer = optax.sgd(0.1)
    params = jax.tree_util.tree_map(lambda leaf: leaf[None], dense())
    state = jax.vmap(optimizer.init)(params)

    @jax.pmap
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for batch in batches():
        params, state, loss = step(params, state, batch[None])
        losses.append(loss[0])
    return hexadecimal(losses)


def exported() -> list[str]:
    """A step that is exported and read back."""
    optimizer = optax.sgd(0.1)
    params = dense()
    state = optimizer.init(params)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def flat_step(leaves: Any, batch: Any) -> Any:
        given = jax.tree_util.tree_unflatten(structure, leaves)
        after, _, loss = step(given, state, batch)
        return jax.tree_util.tree_leaves(after), loss

    leaves, structure = jax.tree_util.tree_flatten(params)
    call = jax.export.deserialize(
        jax.export.export(jax.jit(flat_step))(leaves, batches()[0]).serialize()
    ).call
    losses = []
    for batch in batches():
        leaves, loss = call(leaves, batch)
        losses.append(loss)
    return hexadecimal(losses)


PROGRAMS: dict[str, Callable[[], list[str]]] = {
    function.__name__: function
    for function in (
        plain,
        scanned_steps,
        scanned_layers,
        accumulated,
        with_nnx,
        with_linen,
        with_equinox,
        without_jit,
        population,
        parallel,
        exported,
    )
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: run() for name, run in PROGRAMS.items()}) + "\n")
