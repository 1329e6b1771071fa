"""Record a program as its author would: its own loop, with a hook in it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from benchmarks.detection.programs import Program
from watchstep import CaptureConfig, Hook

LOOK_SECONDS = 25e-6
"""What a measurement takes by the fixed clock; a call of the kernel on a small tensor, with its record, takes about that."""


class EnoughStepsError(Exception):
    """A training was asked to end early."""


class FixedClock:
    """A clock on which every step and every measurement takes the same, so that cadences can be had again."""

    def __init__(self, step_seconds: float, most_steps: int | None = None) -> None:
        self._now = 0.0
        self._step_seconds = step_seconds
        self._left = most_steps

    def __call__(self) -> float:
        self._now += LOOK_SECONDS
        return self._now

    def step(self) -> None:
        """A step of the program's own work is done.

        Raises:
            EnoughStepsError: it was the last that is wanted.
        """
        self._now += self._step_seconds
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                raise EnoughStepsError


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
