"""Programs that train with gradient tapes, plain and recorded: ``python programs.py STORE RESULTS``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import watchstep
from tests.frameworks.recorded_programs import printed_by
from watchstep import CaptureConfig, StopTraining
from watchstep.tensorflow import Recording

EVERY_STEP = CaptureConfig(overhead_budget=None, system=None)
STEPS, BATCH, BAD = 8, 16, 3
Record = Callable[[], object]


class Network(tf.Module):
    """Two dense layers."""

    def __init__(self) -> None:
        super().__init__(name="network")
        random = np.random.default_rng(0)
        with tf.name_scope("hidden"):
            self.w = tf.Variable(random.standard_normal((6, 12)).astype("float32"), name="kernel")
            self.b = tf.Variable(tf.zeros(12), name="bias")
        with tf.name_scope("out"):
            self.v = tf.Variable(random.standard_normal((12, 3)).astype("float32"), name="kernel")

    def loss(self, x: Any, y: Any) -> Any:
        logits = tf.nn.relu(x @ self.w + self.b) @ self.v
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def batches(*, bad: bool = False) -> list[tuple[Any, Any]]:
    random = np.random.default_rng(1)
    x = random.standard_normal((STEPS, BATCH, 6)).astype("float32")
    if bad:
        x[BAD, 0] = np.nan
    y = random.integers(0, 3, (STEPS, BATCH)).astype("int32")
    return [(tf.constant(x[step]), tf.constant(y[step])) for step in range(STEPS)]


def plain_step(network: Network) -> Any:
    variables = [network.w, network.b, network.v]

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = network.loss(x, y)
        for variable, gradient in zip(variables, tape.gradient(value, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return value

    return step


def trained(network: Network, step: Any, *, bad: bool = False) -> Any:
    losses = [float(step(x, y)) for x, y in batches(bad=bad)]
    return losses, [variable.numpy().tobytes().hex() for variable in (network.w, network.b, network.v)]


def eager(record: Record) -> Any:
    network = Network()
    record()
    return trained(network, plain_step(network))


def graph(record: Record) -> Any:
    network = Network()
    record()
    return trained(network, tf.function(plain_step(network)))


def compiled(record: Record) -> Any:
    network = Network()
    record()
    return trained(network, tf.function(plain_step(network), jit_compile=True))


def loop(record: Record) -> Any:
    """All steps in one call of a function."""
    network = Network()
    record()
    step = plain_step(network)
    made = batches()
    xs, ys = tf.stack([x for x, _ in made]), tf.stack([y for _, y in made])

    @tf.function
    def train() -> Any:
        losses = tf.TensorArray(tf.float32, STEPS)
        for number in tf.range(STEPS):
            losses = losses.write(number, step(xs[number], ys[number]))
        return losses.stack()

    return [float(value) for value in train()], network.w.numpy().tobytes().hex()


def penalty(record: Record) -> Any:
    """A penalty on gradients: an inner tape within the outer one."""
    network = Network()
    record()
    variables = [network.w, network.b, network.v]

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                value = network.loss(x, y)
            (first,) = inner.gradient(value, [network.w])
            total = value + 0.01 * tf.reduce_sum(first * first)
        for variable, gradient in zip(variables, tape.gradient(total, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return total

    return trained(network, step)


def rows(record: Record, *, jit_compile: bool = False) -> Any:
    """An embedding, whose gradient is slices of rows."""
    table = tf.Variable(
        np.random.default_rng(2).standard_normal((50, 4)).astype("float32"), name="embedding/table"
    )
    # With a constant, TensorFlow would combine it with those of the gradient if nothing else reads the gradient.
    rate = tf.Variable(0.1)
    record()

    @tf.function(jit_compile=jit_compile)
    def step(numbers: Any) -> Any:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.gather(table, numbers) ** 2)
        (gradient,) = tape.gradient(value, [table])
        table.scatter_sub(tf.IndexedSlices(rate * gradient.values, gradient.indices))
        return value

    random = np.random.default_rng(3)
    losses = [float(step(tf.constant(random.integers(0, 50, 7 + number)))) for number in range(STEPS)]
    return losses, table.numpy().tobytes().hex()


def compiled_rows(record: Record) -> Any:
    return rows(record, jit_compile=True)


KINDS = {kind.__name__: kind for kind in (eager, graph, compiled, loop, penalty, rows, compiled_rows)}


def main(store: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"unmodified": printed_by(Path(__file__).with_name("unmodified.py"))}
    for kind, program in KINDS.items():
        unrecorded = program(lambda: None)
        with watchstep.Hook(store, run=kind, config=EVERY_STEP) as hook:
            recorded = program(lambda: Recording(hook))
        results[kind] = {
            "equal": unrecorded == recorded,
            "faults": hook.health["faults"],
            "losses": recorded[0],
        }
    for kind, wrap in (("bad_graph", tf.function), ("bad_eager", lambda step: step)):
        network = Network()
        with watchstep.Hook(store, run=kind, config=EVERY_STEP, on_nonfinite="stop") as hook:
            Recording(hook)
            try:
                trained(network, wrap(plain_step(network)), bad=True)
                results[kind] = {"stopped": None}
            except StopTraining as stop:
                finite = bool(np.isfinite(network.w.numpy()).all())
                results[kind] = {"stopped": stop.step, "faults": hook.health["faults"], "finite": finite}
    return results


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(Path(sys.argv[1]))))
