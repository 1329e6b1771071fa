"""Record a program as its author would: its own loop, with a hook in it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from benchmarks.detection.fixed_clock import EnoughStepsError, FixedClock
from benchmarks.detection.programs import Program
from watchstep import CaptureConfig, Hook


def record(
    program: Program, seed: int, folder: Path, step_seconds: float, most_steps: int | None = None
) -> str:
    """Train with the shipped default capture.

    Args:
        program: what to train.
        seed: of the program.
        folder: the store.
        step_seconds: what a step takes by the fixed clock.
        most_steps: end after so many; None for the whole training.

    Returns:
        The run's URL.
    """
    torch.set_num_threads(1)
    clock = FixedClock(step_seconds, most_steps)
    config = CaptureConfig(clock=clock)
    with (
        Hook(folder, run=f"{program.id}-{seed}", config=config) as hook,
        contextlib.suppress(EnoughStepsError),
    ):
        program.train(hook, seed, clock)
    faults = hook.health["faults"]
    if faults:
        raise RuntimeError(f"{program.id}, seed {seed}: the recorder had faults: {faults}")
    return hook.run_url
