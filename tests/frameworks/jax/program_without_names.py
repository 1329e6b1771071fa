"""A training with all that JAX's names are looked up for, without one of them: ``python -m tests.frameworks.jax.program_without_names``."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.missing_names import (
    COMPLETE,
    WITHOUT_MODULE,
    WITHOUT_WATCHSTEP,
    print_results,
    recorded,
    remove,
)
from watchstep.jax.internals import jax_names

BATCH = np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(4, 2)


def _loss(params: Any, batch: Any) -> Any:
    return jnp.mean((batch @ params["kernel"] - 1.0) ** 2)


def _params(name: str) -> Any:
    return {"kernel": jnp.ones((2, 1 + len(name)), jnp.float32)}


def _updated(optimizer: Any, params: Any, state: Any) -> Any:
    loss, gradients = jax.value_and_grad(_loss)(params, BATCH)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def compiled() -> list[str]:
    optimizer = optax.sgd(0.1)
    params = _params("c")
    state = optimizer.init(params)
    step = jax.jit(functools.partial(_updated, optimizer))
    losses = []
    for _ in range(2):
        params, state, loss = step(params, state)
        losses.append(float(loss).hex())
    step._cache_size()
    return losses


def scanned() -> list[str]:
    optimizer = optax.sgd(0.1)
    params = _params("scanned")

    @jax.jit
    def steps(carry: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            params, state, loss = _updated(optimizer, *carry)
            return (params, state), loss

        return jax.lax.scan(body, carry, None, length=3)

    _, losses = steps((params, optimizer.init(params)))
    return [float(loss).hex() for loss in losses]


def accumulated() -> list[str]:
    optimizer = optax.MultiSteps(optax.sgd(0.1), 2)
    params = _params("accumulated")
    state = optimizer.init(params)
    step = jax.jit(functools.partial(_updated, optimizer))
    losses = []
    for _ in range(4):
        params, state, loss = step(params, state)
        losses.append(float(loss).hex())
    return losses


def in_parts() -> list[str]:
    """Two transformations, with an operation of the program between them."""
    clip, optimizer = optax.clip(1.0), optax.sgd(0.1)
    params = _params("in_parts")

    @jax.jit
    def step(params: Any) -> Any:
        loss, gradients = jax.value_and_grad(_loss)(params, BATCH)
        clipped, _ = clip.update(gradients, optax.EmptyState())
        halved = jax.tree.map(lambda gradient: gradient / 2, clipped)
        updates, _ = optimizer.update(halved, optimizer.init(params))
        return optax.apply_updates(params, updates), loss

    params, loss = step(params)
    return [float(loss).hex()]


class _NnxNetwork(nnx.Module):
    def __init__(self) -> None:
        self.first = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    def __call__(self, batch: Any) -> Any:
        return nnx.relu(self.first(batch))


class _LinenNetwork(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, batch: Any) -> Any:
        return flax.linen.relu(flax.linen.Dense(3, name="dense")(batch))


def _modules(params: Any, apply: Any) -> list[str]:
    optimizer = optax.sgd(0.1)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda own: jnp.mean((apply(own, BATCH) - 1.0) ** 2))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, state, loss = step(params, state)
    return [float(loss).hex()]


def with_nnx() -> list[str]:
    definition, params = nnx.split(_NnxNetwork())
    return _modules(params, lambda own, batch: nnx.merge(definition, own)(batch))


def with_linen() -> list[str]:
    model = _LinenNetwork()
    return _modules(model.init(jax.random.key(0), BATCH), model.apply)


def replayed() -> list[str]:
    from watchstep import WatchstepError
    from watchstep.jax import find_first_bad

    with contextlib.suppress(WatchstepError):
        find_first_bad(jnp.log, jnp.array(-1.0))
    return []


PARTS = (compiled, scanned, accumulated, in_parts, with_nnx, with_linen)
NEEDED = {
    "updates": (compiled,),
    "activations": (compiled, with_nnx),
    "activation functions": (compiled, with_nnx),
    "activations of Flax NNX": (compiled, with_nnx, with_linen),
    "activations of Flax linen": (compiled, with_nnx, with_linen),
    "updates of optax.MultiSteps": (compiled, accumulated),
    "optax transformations that a program applies one by one, with operations of its own between them": (
        compiled,
        in_parts,
    ),
    "the number of compiled programs": (compiled,),
    "evaluating a step operation by operation": (compiled, replayed),
    "exact source lines": (compiled, replayed),
}
"""The parts that are run without a name, by its cost; by default compiled and scanned steps."""


def _program(parts: Any) -> dict[str, list[str]]:
    return {part.__name__: part() for part in parts}


def _run(key: str) -> dict[str, Any]:
    if key == WITHOUT_WATCHSTEP:
        return {"result": _program(PARTS)}
    parts: Any = PARTS
    if key == WITHOUT_MODULE:
        sys.modules["watchstep.jax.recording"] = None  # type: ignore[assignment]
    elif key != COMPLETE:
        parts = NEEDED.get(jax_names.table[key].cost, (compiled, scanned))
        remove(jax_names, key)

    def start(hook: Any) -> None:
        from watchstep.jax import Recording

        Recording(hook, activations=True)

    return recorded(start, lambda _: _program(parts))


ALL = (WITHOUT_WATCHSTEP, COMPLETE, WITHOUT_MODULE, *jax_names.table)

if __name__ == "__main__":
    print_results(sys.argv[1:] or ALL, _run)
