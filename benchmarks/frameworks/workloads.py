"""The trainings, their variants, and what each is to cost."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.frameworks.training import Start


@dataclass(frozen=True)
class FrameworkWorkload:
    """A training of a framework.

    Attributes:
        title: in the remarks.
        module: of this package, which imports the framework.
        start: name of the function in it that starts a training.
        variants: those that are measured, besides the plain one.
        targets: variant → the highest ratio of process CPU time to the plain training.
        environment: of its processes.
        steps: of a round; an adaptive variant measures several times in it.
        first: steps of the first call.
    """

    title: str
    module: str
    start: str
    variants: tuple[str, ...]
    targets: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    steps: int = 100
    first: int = 1

    def starts(self) -> Start:
        """The function that starts it. Imports the framework."""
        start: Start = getattr(importlib.import_module(f"benchmarks.frameworks.{self.module}"), self.start)
        return start


_JAX = ("plain_again", "defaults", "every_step", "naive")
_KERAS = ("plain_again", "defaults", "every_step", "tensorboard")
_TAPE = ("plain_again", "defaults", "every_step")

WORKLOADS = {
    "jax_transformer": FrameworkWorkload(
        "JAX, transformer of 4 layers under a scan, width 192, batch 8x64",
        "jax_trainings",
        "start_transformer",
        _JAX,
        {"defaults": 1.01},
        steps=40,
    ),
    "jax_cnn": FrameworkWorkload(
        "JAX, CNN, batch 64",
        "jax_trainings",
        "start_cnn",
        _JAX,
        {"defaults": 1.05, "every_step": 1.05},
    ),
    "jax_mlp": FrameworkWorkload(
        "JAX, MLP of 1.86 million parameters, batch 256",
        "jax_trainings",
        "start_mlp",
        _JAX,
        {"every_step": 1.12},
    ),
    "jax_scanned_steps": FrameworkWorkload(
        "JAX, the same transformer, ten steps under a scan in a dispatch",
        "jax_trainings",
        "start_scanned_transformer",
        ("plain_again", "defaults"),
        steps=40,
        first=10,
    ),
    "keras_tensorflow": FrameworkWorkload(
        "Keras on TensorFlow, MLP 784-1024-1024-10 with BatchNorm, batch 64, fit",
        "keras_trainings",
        "start_mlp",
        _KERAS,
        {"defaults": 1.05},
        {"KERAS_BACKEND": "tensorflow"},
    ),
    "keras_jax": FrameworkWorkload(
        "Keras on JAX, the same",
        "keras_trainings",
        "start_mlp",
        _KERAS,
        {"defaults": 1.05},
        {"KERAS_BACKEND": "jax"},
    ),
    "tensorflow_graph": FrameworkWorkload(
        "TensorFlow tape in a tf.function, MLP of 1.86 million parameters, batch 256",
        "tape_trainings",
        "start_graph",
        _TAPE,
    ),
    "tensorflow_compiled": FrameworkWorkload(
        "the same, jit_compile=True",
        "tape_trainings",
        "start_compiled",
        _TAPE,
    ),
}
QUICK = ("jax_cnn", "keras_tensorflow")
