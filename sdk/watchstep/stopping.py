"""How Watchstep stops a training process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from watchstep.errors import ConfigError
from watchstep.format.control import StopRequest

EXIT_STOPPED = 86
"""Exit code of a process that ends by an uncaught `StopTraining`."""

EXIT_TOMBSTONE = 87
"""Exit code of ``watchstep run`` when the run was stopped earlier and must not start again."""

NOT_AGAIN = "it could not be computed again"
"""In the reason of a stop by the gate policy whose step did not come again, see `watchstep.trace.redo`."""

FROM_ANOTHER_RANK = "came from another rank"
"""In the reason of a stop on a rank whose own values were finite."""

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


_SKIPS = re.compile(r"skip(?::([1-9][0-9]{0,8}))?")


@dataclass(frozen=True)
class OnNonfinite:
    """The gate policy: what happens with an update by gradients that are NaN or infinite.

    Attributes:
        action: ``record`` it, and change nothing; ``skip`` it; or ``stop`` the training before it.
        max_skips: with ``skip``, the number of skipped updates in a row after which the next one stops the training; None for no limit.
    """

    action: Literal["record", "skip", "stop"] = "record"
    max_skips: int | None = None

    @classmethod
    def parse(cls, text: str) -> OnNonfinite:
        """Read ``record``, ``skip``, ``skip:N`` or ``stop``.

        Raises:
            ConfigError: It is none of them.
        """
        if text == "record":
            return cls()
        if text == "stop":
            return cls("stop")
        match = _SKIPS.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ConfigError(f"invalid on_nonfinite={text!r}"[:200], f"use {', '.join(ON_NONFINITE_WORDS)}")
        return cls("skip", None if match[1] is None else int(match[1]))

    def __str__(self) -> str:
        return self.action if self.max_skips is None else f"{self.action}:{self.max_skips}"

    def stops_at(self, in_a_row: int) -> bool:
        """Return whether the training stops before the last of some non-finite updates in a row."""
        return self.action == "stop" or (self.max_skips is not None and in_a_row > self.max_skips)

    def reason(self, step: int, in_a_row: int, explanation: str = "") -> str:
        """Return the reason of a stop before the last of some non-finite updates in a row.

        Args:
            step: the step of that update.
            in_a_row: the number of these updates.
            explanation: what the step has shown when it was computed again; empty if it was not.
        """
        was_skipped = self.action == "skip" and in_a_row > 1
        skipped = f", after {in_a_row - 1} skipped updates" if was_skipped else ""
        return f"the gradients of step {step} are not finite{skipped}{explanation and '; '}{explanation}"


ON_NONFINITE_WORDS = ('"record"', '"skip"', '"skip:N"', '"stop"')
"""The forms that `OnNonfinite.parse` accepts."""


class StopTraining(SystemExit):
    """Raised at the end of a step if the program opted in with ``on_stop="raise"``, or by a guard or the gate policy before an update.

    It is a `SystemExit`, so that ``except Exception`` in a training loop does not swallow it, and a program
    that does not catch it ends with code 86 and no stack trace.
    """

    def __init__(self, request: StopRequest, step: int) -> None:
        super().__init__(EXIT_STOPPED)
        self.request = request
        self.step = step

    def __str__(self) -> str:
        return f"stopped after step {self.step}: {self.request.reason}"
