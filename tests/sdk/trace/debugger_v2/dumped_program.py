"""The TensorFlow program whose dumps are fixtures: a dense net with a cross entropy written by hand, which takes the logarithm of zero.

Run by `make_dumps.py`, with TensorFlow: ``python dumped_program.py DUMP_ROOT MODE graph|eager|nested [RING [DTYPE]]``.
"""

# ruff: noqa: E402, SIM108
# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

import os
import socket
import sys
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
socket.gethostname = lambda: "host-0"

import tensorflow as tf


class Dense(tf.Module):
    """A dense layer."""

    def __init__(self, inputs: int, outputs: int, name: str) -> None:
        super().__init__(name=name)
        with self.name_scope:
            values = tf.reshape(tf.range(inputs * outputs, dtype=tf.float32), (inputs, outputs)) - 5.0
            self.w = tf.Variable(values / 10.0, name="w")
            self.b = tf.Variable(tf.zeros(outputs), name="b")

    @tf.Module.with_name_scope
    def __call__(self, x: Any) -> Any:
        return tf.matmul(x, self.w) + self.b


def cross_entropy(probabilities: Any, labels: Any) -> Any:
    return -tf.reduce_mean(tf.reduce_sum(labels * tf.math.log(probabilities), axis=-1))  # planted


def train(program: str) -> None:
    hidden, head = Dense(4, 6, "hidden"), Dense(6, 3, "head")
    variables = [hidden.w, hidden.b, head.w, head.b]

    def step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = head(tf.nn.relu(hidden(x)))
            loss = cross_entropy(tf.nn.softmax(logits), labels)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=0.01, delta=gradient)
        return loss

    run = tf.function(step) if program == "graph" else step
    labels = tf.one_hot([0, 1], 3)
    for scale in (0.1, 100.0):  # probabilities of the second batch underflow to zero
        run(tf.ones((2, 4)) * scale, labels)


def nested() -> None:
    @tf.function
    def root(x: Any) -> Any:
        return tf.sqrt(x)  # planted

    @tf.function
    def outer(x: Any) -> Any:
        total, count = tf.zeros(()), tf.constant(0)
        while count < 3:
            total += tf.reduce_sum(x)
            count += 1
        if total > 0:
            y = root(x - 2.0)
        else:
            y = x
        masked = tf.where(x > 0.0, x, tf.math.log(x - x))  # contained: the logarithm is removed
        return tf.reduce_sum(y) + tf.reduce_sum(masked)

    outer(tf.constant([1.0, 2.0, 3.0]))


def main() -> None:
    root, mode, program = sys.argv[1:4]
    ring = int(sys.argv[4]) if len(sys.argv) > 4 else -1
    dtypes = sys.argv[5:] or None
    writer = tf.debugging.experimental.enable_dump_debug_info(
        root, tensor_debug_mode=mode, circular_buffer_size=ring, tensor_dtypes=dtypes
    )
    if program == "nested":
        nested()
    else:
        train(program)
    writer.FlushNonExecutionFiles()
    writer.FlushExecutionFiles()


main()
