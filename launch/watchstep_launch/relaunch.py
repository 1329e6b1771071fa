"""Relaunching a job after a stop: the user's settings, and the part of the job record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from watchstep.errors import ConfigError


@dataclass(frozen=True)
class Requeue:
    """Settings for launching a job again after a rule has stopped it; see `requeue`."""

    from_: Literal["last_good"] = "last_good"
    limit: int = 1

    def __post_init__(self) -> None:
        if self.from_ != "last_good":
            raise ConfigError(f"requeue(from_={self.from_!r})", 'use "last_good", the only supported value')
        if type(self.limit) is not int or not 1 <= self.limit <= 100:
            raise ConfigError(f"requeue(limit={self.limit!r})", "use a whole number from 1 to 100")


def requeue(from_: Literal["last_good"] = "last_good", *, limit: int = 1) -> Requeue:
    """Launch a job again when a rule has stopped it, as a new attempt of its run: ``Estimator(…, on_stop=requeue(limit=2))``.

    The waiting process does this: `Job.wait`, here or after `Job.reattach`. A job that a person stopped, or a run without a known good
    checkpoint, is not launched again.

    Args:
        from_: the program receives the last checkpoint before the bad step (``WATCHSTEP_RESUME_FROM``).
        limit: how often at most, over the whole run.

    Raises:
        ConfigError: an argument is invalid.
    """
    return Requeue(from_, limit)


@dataclass(frozen=True)
class Intent:
    """A launch in progress, saved before it is submitted, so that it is submitted only once.

    Attributes:
        attempt: the attempt that it will be.
        name: name of the job on its backend.
        path: path of the checkpoint.
        step: the last step that the checkpoint includes.
        written: time of the intent in seconds since 1970; 0 if unknown, which counts as long ago.
    """

    attempt: str
    name: str
    path: str
    step: int
    written: float = 0.0

    def remaining_seconds(self, seconds: float) -> float:
        """Return how long the submission may still be in progress if it takes ``seconds`` at most; never more, even if the clock was set back."""
        return min(seconds, self.written + seconds - time.time())


@dataclass(frozen=True)
class Relaunch:
    """What is needed to launch a job again. It contains no token; the environment is the one that the user gave the job.

    Attributes:
        command: program and arguments, as submitted.
        environment: variables except those for service, attempt and checkpoint.
        folder: the working directory.
        bound_as: name of the backend with the service.
        limit: how often the job may be launched again.
        done: how often it was launched again.
        intent: the launch in progress; None if there is none.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    bound_as: str
    limit: int
    done: int = 0
    intent: Intent | None = field(default=None)

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {**asdict(self), "environment": dict(self.environment)}

    @classmethod
    def from_data(cls, data: Any) -> Relaunch:
        """Parse the result of `as_data`. Raises KeyError, TypeError, ValueError if it has another form."""
        fields = dict(data)
        intent = fields.pop("intent", None)
        command = tuple(str(word) for word in fields.pop("command"))
        return cls(command=command, intent=Intent(**intent) if intent else None, **fields)
