"""Programs of JAX with optax."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.detection.other_frameworks.program import CLASSES, FEATURES, batches
from benchmarks.detection.programs import Clock
from watchstep import Hook
from watchstep.jax import Recording

_PER_DISPATCH = 10


def _parameters(seed: int, sizes: tuple[int, ...], scale: float | None) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        f"dense_{number}": {
            "kernel": jnp.asarray(
                random.standard_normal((before, after)) * (np.sqrt(2 / before) if scale is None else scale),
                jnp.float32,
            ),
            "bias": jnp.zeros(after),
        }
        for number, (before, after) in enumerate(itertools.pairwise(sizes))
    }


def _loss(activation: Any) -> Any:
    def loss_of(parameters: Any, batch: Any) -> Any:
        hidden, labels = batch
        for number in range(len(parameters)):
            layer = parameters[f"dense_{number}"]
            hidden = hidden @ layer["kernel"] + layer["bias"]
            if number < len(parameters) - 1:
                hidden = activation(hidden)
        return optax.softmax_cross_entropy_with_integer_labels(hidden, labels).mean()

    return loss_of


def _step(loss_of: Any, optimizer: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        parameters, inner = state
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        updates, inner = optimizer.update(gradients, inner, parameters)
        return (optax.apply_updates(parameters, updates), inner), loss

    return step


def zero_example(hook: Hook, seed: int, clock: Clock, faulty: bool) -> list[float]:
    """Adam, one step in a dispatch."""
    Recording(hook)
    parameters = _parameters(seed, (FEATURES, 64, 64, CLASSES), None)
    return _trained(parameters, jax.nn.relu, optax.adam(2e-3), batches(seed, zero_example=faulty), clock)


def tiny_weights(hook: Hook, seed: int, clock: Clock, faulty: bool) -> list[float]:
    """SGD on layers of sigmoids with tiny weights, or of rectifiers with He's. Adam would let the gradients grow."""
    Recording(hook)
    sizes = (FEATURES, 32, 32, 32, 32, CLASSES)
    parameters = _parameters(seed, sizes, 1e-3 if faulty else None)
    activation = jax.nn.sigmoid if faulty else jax.nn.relu
    return _trained(parameters, activation, optax.sgd(0.03, momentum=0.9), batches(seed), clock)


def _trained(parameters: Any, activation: Any, optimizer: Any, data: Any, clock: Clock) -> list[float]:
    step = jax.jit(_step(_loss(activation), optimizer), donate_argnums=0)
    state = (parameters, optimizer.init(parameters))
    losses = []
    for batch in data:
        state, loss = step(state, batch)
        losses.append(loss)
        clock.step()
    return [float(loss) for loss in losses]


def scanned_steps_rate(hook: Hook, seed: int, clock: Clock, faulty: bool) -> list[float]:
    """SGD, ten steps in a dispatch."""
    Recording(hook)
    optimizer = optax.sgd(30.0 if faulty else 0.1)
    parameters = _parameters(seed, (FEATURES, 64, 64, CLASSES), None)
    step = _step(_loss(jax.nn.relu), optimizer)
    steps = jax.jit(lambda state, part: jax.lax.scan(step, state, part))
    state = (parameters, optimizer.init(parameters))
    data = batches(seed)
    losses: list[float] = []
    for start in range(0, len(data), _PER_DISPATCH):
        part = data[start : start + _PER_DISPATCH]
        state, found = steps(state, tuple(np.stack(values) for values in zip(*part, strict=True)))
        losses += [float(loss) for loss in found]
        for _ in part:
            clock.step()
    return losses
