"""Programs of TensorFlow 2 with `tf.GradientTape` in a `tf.function`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.detection.other_frameworks.program import CLASSES, FEATURES, batches
from benchmarks.detection.programs import Clock
from watchstep import Hook
from watchstep.tensorflow import Recording

_SIZES = (FEATURES, 64, 64, CLASSES)


def _trained(seed: int, rate: float, data: Any, clock: Clock) -> list[float]:
    random = np.random.default_rng(seed)
    variables: list[Any] = []
    for number, (before, after) in enumerate(itertools.pairwise(_SIZES)):
        kernel = (random.standard_normal((before, after)) * np.sqrt(2 / before)).astype(np.float32)
        variables.append(tf.Variable(kernel, name=f"dense_{number}/kernel"))
        variables.append(tf.Variable(tf.zeros(after), name=f"dense_{number}/bias"))

    @tf.function
    def step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = inputs
            for number in range(len(_SIZES) - 1):
                hidden = hidden @ variables[2 * number] + variables[2 * number + 1]
                if number < len(_SIZES) - 2:
                    hidden = tf.nn.relu(hidden)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, hidden))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(rate * gradient)
        return loss

    losses = []
    for inputs, labels in data:
        losses.append(step(tf.constant(inputs), tf.constant(labels)))
        clock.step()
    return [float(loss) for loss in losses]


def zero_example(hook: Hook, seed: int, clock: Clock, faulty: bool) -> list[float]:
    """SGD."""
    Recording(hook)
    return _trained(seed, 0.1, batches(seed, zero_example=faulty), clock)


def rate(hook: Hook, seed: int, clock: Clock, faulty: bool) -> list[float]:
    """SGD, at a rate that is too high or not."""
    Recording(hook)
    return _trained(seed, 30.0 if faulty else 0.1, batches(seed), clock)
