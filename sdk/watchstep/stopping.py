"""How a training process stops when Watchstep asks it to."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from watchstep.format.control import StopRequest

EXIT_STOPPED = 86
"""Exit code of a process that a stop ended and that did not catch `StopTraining`."""

EXIT_TOMBSTONE = 87
"""Exit code of ``watchstep run`` when the run was stopped before and may not start again."""

OnStop = Literal["ignore", "check", "raise"] | Callable[[StopRequest], None]
"""What a cooperative stop does in this process: nothing; nothing but to set `Hook.stopped`, at which the program ends by itself;
raise `StopTraining`; or call a function."""


RESUME_FROM = "WATCHSTEP_RESUME_FROM"
"""The checkpoint that a training goes on from, as its program named it; set where a stopped run is launched again."""

FIRST_STEP = "WATCHSTEP_FIRST_STEP"
"""The number of the first step, set beside ``WATCHSTEP_RESUME_FROM``."""


def resume_from() -> str | None:
    """The checkpoint to go on from; None to begin anew: ``trainer.train(resume_from_checkpoint=watchstep.resume_from())``."""
    return os.environ.get(RESUME_FROM) or None


@dataclass(frozen=True)
class SavesThenStops:
    """A program's function that saves a checkpoint; once it returns, the training ends by `StopTraining`."""

    save: Callable[[StopRequest], None]

    def __call__(self, request: StopRequest) -> None:
        """Save one."""
        self.save(request)


@dataclass(frozen=True)
class AwaitsCheckpoint:
    """The training goes on until the program notes a checkpoint that it has saved, and ends then by `StopTraining`.

    Attributes:
        seconds: after so long it ends without one.
    """

    seconds: float

    def __call__(self, request: StopRequest) -> None:
        """Nothing yet."""


@dataclass(frozen=True)
class Noted:
    """A stop that whoever is told carries out later, by itself."""

    note: Callable[[StopRequest], None]

    def __call__(self, request: StopRequest) -> None:
        """Note it."""
        self.note(request)


class StopTraining(SystemExit):
    """Raised at the end of a step, where the program opted in with ``on_stop="raise"``; before an update, by a guard.

    It is a `SystemExit`, so that ``except Exception`` in a training loop does not swallow it, and so that a program
    that does not catch it ends with code 86 and no stack trace.
    """

    def __init__(self, request: StopRequest, step: int) -> None:
        super().__init__(EXIT_STOPPED)
        self.request = request
        self.step = step

    def __str__(self) -> str:
        return f"stopped after step {self.step}: {self.request.reason}"
