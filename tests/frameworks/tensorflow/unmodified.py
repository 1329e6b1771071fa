"""A program that does not name Watchstep."""

import sys
from typing import Any

import numpy as np
import tensorflow as tf

w = tf.Variable(np.ones((4, 2), "float32"), name="dense/kernel")


@tf.function
def step(x: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ w) ** 2)
    (gradient,) = tape.gradient(loss, [w])
    w.assign_sub(0.1 * gradient)
    return loss


losses = [float(step(tf.constant(np.full((3, 4), 0.1 * n, "float32")))) for n in range(6)]
sys.stdout.write(f"{losses}\n")
