"""The MLP of 1.86 million parameters with `tf.GradientTape`: a `tf.function` without and with ``jit_compile``."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.frameworks.training import digest, open_recorder

_SIZES = (784, 1024, 1024, 10)
_BATCH, _BATCHES = 256, 8


class TapeTraining:
    """A training with a momentum update that the program writes itself."""

    def __init__(self, variant: str, folder: Path, *, jit_compile: bool) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        self._recorder = open_recorder(variant, folder)
        if self._recorder is not None:
            from watchstep.tensorflow import Recording

            Recording(self._recorder.hook)
        random = np.random.default_rng(1)
        self._variables: list[Any] = []
        for number, (before, after) in enumerate(itertools.pairwise(_SIZES)):
            kernel = (random.standard_normal((before, after)) / np.sqrt(before)).astype(np.float32)
            self._variables.append(tf.Variable(kernel, name=f"dense_{number}/kernel"))
            self._variables.append(tf.Variable(tf.zeros(after), name=f"dense_{number}/bias"))
        momenta = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in self._variables]
        self._batches = [
            (
                tf.constant(random.standard_normal((_BATCH, _SIZES[0])).astype(np.float32)),
                tf.constant(random.integers(0, _SIZES[-1], _BATCH)),
            )
            for _ in range(_BATCHES)
        ]
        self._losses: list[Any] = []
        variables = self._variables

        @tf.function(jit_compile=jit_compile)
        def step(inputs: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                hidden = inputs
                for number in range(len(_SIZES) - 1):
                    hidden = hidden @ variables[2 * number] + variables[2 * number + 1]
                    if number < len(_SIZES) - 2:
                        hidden = tf.nn.relu(hidden)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, hidden))
            gradients = tape.gradient(loss, variables)
            for variable, momentum, gradient in zip(variables, momenta, gradients, strict=True):
                momentum.assign(0.9 * momentum + gradient)
                variable.assign_sub(0.01 * momentum)
            return loss

        self._step = step

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._losses.append(self._step(*self._batches[len(self._losses) % _BATCHES]))

    def losses(self) -> list[str]:
        return [float(loss).hex() for loss in self._losses]

    def weights(self) -> str:
        return digest([variable.numpy() for variable in self._variables])

    def close(self) -> dict[str, int]:
        return self._recorder.close() if self._recorder is not None else {}


def start_graph(variant: str, folder: Path) -> TapeTraining:
    return TapeTraining(variant, folder, jit_compile=False)


def start_compiled(variant: str, folder: Path) -> TapeTraining:
    return TapeTraining(variant, folder, jit_compile=True)
