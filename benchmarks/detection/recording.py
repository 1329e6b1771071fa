"""Record a program as its author would: the plain loop, with a hook in it."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.detection.programs import Built, Program
from watchstep import CaptureConfig, Hook

VALIDATED_EVERY = 10
LOOK_SECONDS = 25e-6
"""What a measurement takes by the fixed clock; a call of the kernel on a small tensor, with its record, takes about that."""


class FixedClock:
    """A clock on which every step and every measurement takes the same, so that cadences can be had again."""

    def __init__(self, step_seconds: float) -> None:
        self._now = 0.0
        self._step_seconds = step_seconds

    def __call__(self) -> float:
        self._now += LOOK_SECONDS
        return self._now

    def step(self) -> None:
        """A step of the program's own work is done."""
        self._now += self._step_seconds


def record(program: Program, seed: int, folder: Path, step_seconds: float) -> str:
    """Train with the shipped default capture.

    Args:
        program: what to train.
        seed: of the program.
        folder: the store.
        step_seconds: what a step takes by the fixed clock.

    Returns:
        The run's URL.
    """
    torch.set_num_threads(1)
    clock = FixedClock(step_seconds)
    with Hook(folder, run=f"{program.id}-{seed}", config=CaptureConfig(clock=clock)) as hook:
        _train(hook, clock, program.build(seed))
    faults = hook.health["faults"]
    if faults:
        raise RuntimeError(f"{program.id}, seed {seed}: the recorder had faults: {faults}")
    return hook.run_url


def _train(hook: Hook, clock: FixedClock, built: Built) -> None:
    model, optimizer, loss_function, batches = built
    validation = getattr(batches, "val", None)
    hook.watch(model, optimizer)
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_function(model(x), y)
        loss.backward()
        optimizer.step()
        hook.log(loss=loss)
        hook.record(labels=y)
        if validation is not None and step % VALIDATED_EVERY == 0:
            unseen, labels = validation
            model.eval()
            with torch.no_grad():
                hook.log(loss=loss_function(model(unseen), labels), mode="eval")
            model.train()
        clock.step()
