"""A program that does not name Watchstep."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")])
model.compile(optimizer="adam", loss="mse")
x = np.random.default_rng(0).standard_normal((48, 4)).astype("float32")
history = model.fit(x, x[:, :2], batch_size=8, verbose=0, shuffle=False).history
sys.stdout.write(f"{history}\n")
