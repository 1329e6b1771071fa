"""Trainings with JAX and optax: one compiled step that donates its state, or ten steps under a scan in one dispatch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.frameworks import jax_models
from benchmarks.frameworks.jax_models import JaxModel
from benchmarks.frameworks.training import digest, numpy_row, open_recorder

STEPS_PER_DISPATCH = 10


class JaxTraining:
    """A training of a model with AdamW."""

    def __init__(self, model: JaxModel, variant: str, folder: Path, *, scans_steps: bool = False) -> None:
        self._recorder = open_recorder(variant, folder)
        if self._recorder is not None:
            from watchstep.jax import Recording

            Recording(self._recorder.hook)
        self._is_naive = variant == "naive"
        self._scans_steps = scans_steps
        optimizer = optax.adamw(1e-3)
        parameters = model.parameters()
        self._state: Any = (parameters, optimizer.init(parameters))
        self._batches = model.batches()
        self._losses: list[Any] = []
        self._done = 0
        if scans_steps:
            self._stacked = tuple(
                jnp.stack([batch[part] for batch in (self._batches * 2)[:STEPS_PER_DISPATCH]])
                for part in (0, 1)
            )

        def step(state: Any, batch: Any) -> Any:
            parameters, inner = state
            loss, gradients = jax.value_and_grad(model.loss)(parameters, batch)
            updates, inner = optimizer.update(gradients, inner, parameters)
            return (optax.apply_updates(parameters, updates), inner), loss

        def naive_step(state: Any, batch: Any) -> Any:
            parameters, inner = state
            loss, gradients = jax.value_and_grad(model.loss)(parameters, batch)
            updates, inner = optimizer.update(gradients, inner, parameters)
            return (optax.apply_updates(parameters, updates), inner), (loss, gradients)

        def steps(state: Any, batches: Any) -> Any:
            return jax.lax.scan(step, state, batches)

        chosen = steps if scans_steps else naive_step if self._is_naive else step
        self._step = functools.partial(jax.jit, donate_argnums=0)(chosen)

    def run(self, steps: int) -> None:
        if self._scans_steps:
            for _ in range(max(1, steps // STEPS_PER_DISPATCH)):
                self._state, losses = self._step(self._state, self._stacked)
                self._losses.append(losses)
        elif self._is_naive:
            self._run_naively(steps)
        else:
            for _ in range(steps):
                self._state, loss = self._step(self._state, self._next())
                self._losses.append(loss)
        jax.block_until_ready(self._state)

    def _next(self) -> Any:
        batch = self._batches[self._done % len(self._batches)]
        self._done += 1
        return batch

    def _run_naively(self, steps: int) -> None:
        """Train, and compute statistics of all gradients and weights with NumPy at each step."""
        for _ in range(steps):
            self._state, (loss, gradients) = self._step(self._state, self._next())
            self._losses.append(loss)
            for array in jax.tree_util.tree_leaves(jax.device_get((gradients, self._state[0]))):
                numpy_row(array)

    def losses(self) -> list[str]:
        values = np.concatenate([np.asarray(loss).reshape(-1) for loss in self._losses])
        return [float(value).hex() for value in values]

    def weights(self) -> str:
        return digest(jax.tree_util.tree_leaves(jax.device_get(self._state[0])))

    def close(self) -> dict[str, int]:
        return self._recorder.close() if self._recorder is not None else {}


def start_mlp(variant: str, folder: Path) -> JaxTraining:
    return JaxTraining(jax_models.MLP, variant, folder)


def start_cnn(variant: str, folder: Path) -> JaxTraining:
    return JaxTraining(jax_models.CNN, variant, folder)


def start_transformer(variant: str, folder: Path) -> JaxTraining:
    return JaxTraining(jax_models.TRANSFORMER, variant, folder)


def start_scanned_transformer(variant: str, folder: Path) -> JaxTraining:
    return JaxTraining(jax_models.TRANSFORMER, variant, folder, scans_steps=True)
