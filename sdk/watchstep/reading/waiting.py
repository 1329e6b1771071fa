"""Waiting for steps of a run that goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from watchstep.layout import ENDS
from watchstep.tensors import Mode

if TYPE_CHECKING:
    from watchstep.reading.run import Run

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


def steps_that_come(run: Run, steps: list[int], mode: Mode | None, timeout: float | None) -> list[int]:
    """As `watchstep.Run.wait_for_steps`."""
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while True:
        ended = _has_ended(run)
        if run.refresh():
            pause = _FIRST_PAUSE
        known = set(run.steps(mode))
        there = [step for step in steps if step in known]
        if len(there) == len(steps) or ended or time.monotonic() >= deadline:
            return there
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(_LONGEST_PAUSE, 2 * pause)


def _has_ended(run: Run) -> bool:
    """Whether every attempt that wrote something has a worker that ended."""
    ended = {entry.key.removeprefix(ENDS).split("/")[0] for entry in run.store.entries(ENDS)}
    return bool(run.attempts) and set(run.attempts) <= ended
