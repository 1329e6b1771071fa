"""Programs whose ``fit`` on JAX is stopped before its first step, or between the steps of one execution. They print the weights that are left."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import keras
import numpy as np

import watchstep
from watchstep.keras import Recording

BATCHES = 8


def train(kind: str) -> list[float]:
    """Return the weights after a stop by the gate policy."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((32 * BATCHES, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="out")])
    several = {"steps_per_execution": 4} if kind == "between_steps" else {}
    model.compile(
        optimizer=keras.optimizers.SGD(0.0), loss="mse", run_eagerly=kind.startswith("eager"), **several
    )
    y = x[:, :1].copy()
    # An infinite label makes the gradients of its batch infinite: of the last one of the first fit, or of one within an execution.
    y[32 * (BATCHES if kind.endswith("before_first_step") else 2) - 1] = np.inf
    with watchstep.Hook(tempfile.mkdtemp(), on_stop="raise", on_nonfinite="stop") as hook:
        callbacks: list[Any] = [Recording(hook)]
        try:
            for _ in range(2):
                model.fit(x, y, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
        except watchstep.StopTraining:
            return [float(value) for variable in model.weights for value in np.ravel(variable.numpy())]
    raise AssertionError("the training was not stopped")


if __name__ == "__main__":
    print(train(sys.argv[1]))  # noqa: T201 - read by the test
