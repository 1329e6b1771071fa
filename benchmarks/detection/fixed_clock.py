"""A clock for recordings that can be had again. Imports no framework."""

from __future__ import annotations

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
