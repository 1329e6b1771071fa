"""How Watchstep stops a training process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from watchstep.format.control import StopRequest

EXIT_STOPPED = 86
"""Exit code of a process that ends by an uncaught `StopTraining`."""

EXIT_TOMBSTONE = 87
"""Exit code of ``watchstep run`` when the run was stopped earlier and must not start again."""

OnStop = Literal["ignore", "check", "raise"] | Callable[[StopRequest], None]
"""Effect of a cooperative stop in this process: nothing; only set `Hook.stopped`, upon which the program ends by itself;
raise `StopTraining`; or call a function."""


RESUME_FROM = "WATCHSTEP_RESUME_FROM"
"""The checkpoint to resume from, by the path that the program reported. Set when a stopped run is launched again."""

FIRST_STEP = "WATCHSTEP_FIRST_STEP"
"""The number of the first step, set together with ``WATCHSTEP_RESUME_FROM``."""


def resume_from() -> str | None:
    """Return the checkpoint to resume from, or None: ``trainer.train(resume_from_checkpoint=watchstep.resume_from())``."""
    return os.environ.get(RESUME_FROM) or None


@dataclass(frozen=True)
class SavesThenStops:
    """A program's function that saves a checkpoint; when it returns, the training ends with `StopTraining`."""

    save: Callable[[StopRequest], None]

    def __call__(self, request: StopRequest) -> None:
        """Save a checkpoint."""
        self.save(request)


@dataclass(frozen=True)
class AwaitsCheckpoint:
    """The training continues until the program reports a saved checkpoint, and then ends with `StopTraining`.

    Attributes:
        seconds: time limit, after which the training ends without a checkpoint.
    """

    seconds: float

    def __call__(self, request: StopRequest) -> None:
        """Do nothing yet."""


@dataclass(frozen=True)
class Noted:
    """A stop that the callee carries out later, by itself."""

    note: Callable[[StopRequest], None]

    def __call__(self, request: StopRequest) -> None:
        """Note the request."""
        self.note(request)


class StopTraining(SystemExit):
    """Raised at the end of a step if the program opted in with ``on_stop="raise"``, or by a guard before an update.

    It is a `SystemExit`, so that ``except Exception`` in a training loop does not swallow it, and a program
    that does not catch it ends with code 86 and no stack trace.
    """

    def __init__(self, request: StopRequest, step: int) -> None:
        super().__init__(EXIT_STOPPED)
        self.request = request
        self.step = step

    def __str__(self) -> str:
        return f"stopped after step {self.step}: {self.request.reason}"
