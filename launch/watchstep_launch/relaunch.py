"""How a launched job is launched again after a stop: what its record holds of it, and what users ask for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from watchstep.errors import ConfigError


@dataclass(frozen=True)
class Requeue:
    """Launch again what a rule has stopped; see `requeue`."""

    from_: Literal["last_good"] = "last_good"
    limit: int = 1

    def __post_init__(self) -> None:
        if self.from_ != "last_good":
            raise ConfigError(
                f"requeue(from_={self.from_!r})", 'use "last_good": there is no other place yet'
            )
        if type(self.limit) is not int or not 1 <= self.limit <= 100:
            raise ConfigError(f"requeue(limit={self.limit!r})", "use a whole number from 1 to 100")


def requeue(from_: Literal["last_good"] = "last_good", *, limit: int = 1) -> Requeue:
    """Launch a job again when a rule has stopped it, as a new attempt of its run: ``Estimator(…, on_stop=requeue(limit=2))``.

    Whoever waits does it: `Job.wait`, here or after `Job.reattach`. What people stopped, and a run of which no good checkpoint is
    known, is not launched again.

    Args:
        from_: the program is given the last checkpoint before the bad step (``WATCHSTEP_RESUME_FROM``).
        limit: how often at most, over the whole run.

    Raises:
        ConfigError: an argument is none of these.
    """
    return Requeue(from_, limit)


@dataclass(frozen=True)
class Intent:
    """A launch that is under way: written down before it is submitted, so that nobody submits it twice.

    Attributes:
        attempt: which it will be.
        name: of the job on its backend.
        path: of the checkpoint.
        step: the last step that it holds.
        written: when, in seconds since 1970; 0 where nobody knows, a long time ago.
    """

    attempt: str
    name: str
    path: str
    step: int
    written: float = 0.0

    def may_go_on_for(self, seconds: float) -> float:
        """How many seconds it may still be under way that takes so long at most, at most so long by a clock that was set back."""
        return min(seconds, self.written + seconds - time.time())


@dataclass(frozen=True)
class Relaunch:
    """What it takes to launch a job again. It holds no token; the environment is the one that the user gave the job.

    Attributes:
        command: program and arguments, as they were submitted.
        environment: variables beside those that name service, attempt and checkpoint.
        folder: the working directory.
        bound_as: the backend's name with the service.
        limit: how often.
        done: how often it was.
        intent: the launch that is under way; None for none.
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
        """Read what `as_data` gave. Raises KeyError, TypeError, ValueError where it has another form."""
        held = dict(data)
        intent = held.pop("intent", None)
        command = tuple(str(word) for word in held.pop("command"))
        return cls(command=command, intent=Intent(**intent) if intent else None, **held)
