"""Programs of Keras 3 on TensorFlow, trained by ``fit``."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from benchmarks.detection.other_frameworks.program import BATCH, BATCHES, CLASSES, EPOCHS, FEATURES, batches
from benchmarks.detection.programs import Clock
from watchstep import Hook
from watchstep.keras import Recording


class Ticking(keras.callbacks.Callback):
    """Lets the fixed clock go on."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras'
        self._clock.step()


def _layers(activation: str, hidden: int, initializer: Any) -> list[Any]:
    return [
        *(
            keras.layers.Dense(32, activation=activation, kernel_initializer=initializer)
            for _ in range(hidden)
        ),
        keras.layers.Dense(CLASSES, kernel_initializer=initializer),
    ]


def _fitted(layers: list[Any], optimizer: Any, data: Any, hook: Hook, clock: Clock) -> list[float]:
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    inputs, labels = (np.concatenate(values) for values in zip(*data, strict=True))
    length = BATCH * BATCHES
    losses = []
    recording = Recording(hook)
    for epoch in range(EPOCHS):  # the data of each is shuffled already
        chosen = slice(epoch * length, (epoch + 1) * length)
        history = model.fit(
            inputs[chosen],
            labels[chosen],
            batch_size=BATCH,
            initial_epoch=epoch,
            epochs=epoch + 1,
            shuffle=False,
            verbose=0,
            callbacks=[recording, Ticking(clock)],
        )
        losses.append(float(history.history["loss"][0]))
    return losses


def zero_example(hook: Hook, seed: int, clock: Clock, faulty: bool) -> list[float]:
    """Adam on two layers of rectifiers."""
    keras.utils.set_random_seed(seed)
    layers = _layers("relu", 2, "he_normal")
    return _fitted(layers, keras.optimizers.Adam(2e-3), batches(seed, zero_example=faulty), hook, clock)


def tiny_weights(hook: Hook, seed: int, clock: Clock, faulty: bool) -> list[float]:
    """SGD on layers of sigmoids with tiny weights, or of rectifiers with He's. Adam would let the gradients grow."""
    keras.utils.set_random_seed(seed)
    initializer = keras.initializers.RandomNormal(stddev=1e-3, seed=seed) if faulty else "he_normal"
    layers = _layers("sigmoid" if faulty else "relu", 4, initializer)
    return _fitted(layers, keras.optimizers.SGD(0.03, momentum=0.9), batches(seed), hook, clock)


def rate(hook: Hook, seed: int, clock: Clock, faulty: bool) -> list[float]:
    """SGD on two layers of rectifiers."""
    keras.utils.set_random_seed(seed)
    optimizer = keras.optimizers.SGD(30.0 if faulty else 0.1)
    return _fitted(_layers("relu", 2, "he_normal"), optimizer, batches(seed), hook, clock)
