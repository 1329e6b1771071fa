"""An MLP of Keras 3, trained by ``fit``: 784-1024-1024-10 with BatchNorm, batches of 64. A round is an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np

from benchmarks.frameworks.training import digest, open_recorder

BATCH = 64
MOST_STEPS = 100
"""Steps of the longest epoch."""


class KerasTraining:
    """A training on the backend that Keras has chosen by ``KERAS_BACKEND``."""

    def __init__(self, variant: str, folder: Path) -> None:
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.threading.set_inter_op_parallelism_threads(1)
        self._recorder = open_recorder(variant, folder)
        self._callbacks: list[Any] = []
        if self._recorder is not None:
            from watchstep.keras import Recording

            self._callbacks.append(Recording(self._recorder.hook))
        elif variant == "tensorboard":
            self._callbacks.append(keras.callbacks.TensorBoard(str(folder), histogram_freq=1))
        keras.utils.set_random_seed(0)
        self._model = keras.Sequential(
            [
                keras.Input((784,)),
                keras.layers.Dense(1024, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1024, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # jit_compile="auto" chooses no XLA for TensorFlow on a CPU, and jax.jit for JAX.
        self._model.compile(optimizer="adam", loss=loss)
        random = np.random.default_rng(0)
        self._inputs = random.standard_normal((BATCH * MOST_STEPS, 784)).astype("float32")
        self._labels = random.integers(0, 10, BATCH * MOST_STEPS)
        self._losses: list[float] = []

    def run(self, steps: int) -> None:
        examples = BATCH * min(steps, MOST_STEPS)
        history = self._model.fit(
            self._inputs[:examples],
            self._labels[:examples],
            batch_size=BATCH,
            initial_epoch=len(self._losses),
            epochs=len(self._losses) + 1,
            shuffle=False,
            verbose=0,
            callbacks=self._callbacks,
        )
        self._losses.append(history.history["loss"][0])

    def losses(self) -> list[str]:
        return [float(value).hex() for value in self._losses]

    def weights(self) -> str:
        return digest(self._model.get_weights())

    def close(self) -> dict[str, int]:
        return self._recorder.close() if self._recorder is not None else {}


def start_mlp(variant: str, folder: Path) -> KerasTraining:
    return KerasTraining(variant, folder)
