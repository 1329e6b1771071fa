"""What a program of a framework is, and which there are. Imports no framework."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.programs import Clock
from watchstep import Hook

FrameworkTrain = Callable[[Hook, int, Clock, bool], list[float]]
"""A whole training: hook, seed, clock, whether it has its fault. Returns its losses, by step or epoch."""


@dataclass(frozen=True)
class FrameworkProgram:
    """A program that runs healthy, and with one fault.

    Attributes:
        framework: package that it needs.
        module: of this package.
        function: name of its training there.
        fault: what is wrong in the faulty run.
        expected: rules of which one must fire in the faulty run, at its onset or later.
        onset: the first step at which the fault can be seen.
        environment: of its process.
    """

    framework: str
    module: str
    function: str
    fault: str
    expected: frozenset[str]
    onset: int = 0
    environment: tuple[tuple[str, str], ...] = ()

    def train(self) -> FrameworkTrain:
        """Its training. Imports the framework."""
        found: FrameworkTrain = getattr(
            importlib.import_module(f"benchmarks.detection.other_frameworks.{self.module}"), self.function
        )
        return found


BAD_BATCH = 120
"""Number of the batch with an example of zeros, whose norm an author divides by."""

_NOT_A_NUMBER = frozenset({"nan_or_inf"})
_RUNS_AWAY = frozenset({"exploding_gradient", "nan_or_inf", "loss_spike"})
_VANISHES = frozenset({"vanishing_gradient", "poor_initialization"})
_DIVERGES = frozenset({"loss_not_decreasing", "loss_spike", "lost_progress", "oscillating_loss"})
_KERAS_TENSORFLOW = (("KERAS_BACKEND", "tensorflow"),)
_ZEROS = "an example of zeros is divided by its norm"

PROGRAMS = {
    "jax_zero_example": FrameworkProgram(
        "jax", "jax_programs", "zero_example", _ZEROS, _NOT_A_NUMBER, BAD_BATCH
    ),
    "jax_scanned_steps_rate": FrameworkProgram(
        "jax",
        "jax_programs",
        "scanned_steps_rate",
        "a learning rate of 30 in place of 0.1, ten steps in a dispatch",
        _RUNS_AWAY,
    ),
    "jax_tiny_weights": FrameworkProgram(
        "jax", "jax_programs", "tiny_weights", "sigmoids on weights of 0.001", _VANISHES
    ),
    "keras_zero_example": FrameworkProgram(
        "keras", "keras_programs", "zero_example", _ZEROS, _NOT_A_NUMBER, BAD_BATCH, _KERAS_TENSORFLOW
    ),
    "keras_tiny_weights": FrameworkProgram(
        "keras",
        "keras_programs",
        "tiny_weights",
        "sigmoids on weights of 0.001",
        _VANISHES,
        0,
        _KERAS_TENSORFLOW,
    ),
    "keras_rate": FrameworkProgram(
        "keras",
        "keras_programs",
        "rate",
        "a learning rate of 30 in place of 0.1",
        _RUNS_AWAY,
        0,
        _KERAS_TENSORFLOW,
    ),
    "tensorflow_zero_example": FrameworkProgram(
        "tensorflow", "tape_programs", "zero_example", _ZEROS, _NOT_A_NUMBER, BAD_BATCH
    ),
    "tensorflow_rate": FrameworkProgram(
        "tensorflow", "tape_programs", "rate", "a learning rate of 30 in place of 0.1", _RUNS_AWAY
    ),
    "xgboost_rate": FrameworkProgram(
        "xgboost", "boosted_programs", "xgboost_rate", "a learning rate of 2.1", _DIVERGES
    ),
    "lightgbm_rate": FrameworkProgram(
        "lightgbm", "boosted_programs", "lightgbm_rate", "a learning rate of 2.1", _DIVERGES
    ),
}

FEATURES, CLASSES, BATCH, EPOCHS, BATCHES = 20, 4, 32, 5, 60
Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


def clusters(seed: int, count: int) -> tuple[Floats, Labels]:
    """Clusters that overlap: (count, FEATURES) and their classes."""
    random = np.random.default_rng(7)
    centres = random.standard_normal((CLASSES, FEATURES))
    random = np.random.default_rng(100 + seed)
    labels = random.integers(0, CLASSES, count)
    inputs = centres[labels] + 1.5 * random.standard_normal((count, FEATURES))
    return inputs.astype(np.float32), labels


def batches(seed: int, *, zero_example: bool = False) -> list[tuple[Floats, Labels]]:
    """Batches of all epochs, each example divided by its norm, as some authors do; one of zeros becomes NaN.

    The data is shuffled anew each epoch.
    """
    inputs, labels = clusters(seed, BATCH * BATCHES)
    random = np.random.default_rng(seed)
    found = []
    for _ in range(EPOCHS):
        for chosen in random.permutation(len(inputs)).reshape(BATCHES, BATCH):
            found.append((inputs[chosen], labels[chosen]))  # noqa: PERF401 - two loops read better
    if zero_example:
        found[BAD_BATCH][0][0] = 0.0
    with np.errstate(invalid="ignore"):
        root = np.float32(np.sqrt(FEATURES))
        return [(root * x / np.linalg.norm(x, axis=1, keepdims=True), y) for x, y in found]
