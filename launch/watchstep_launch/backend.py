"""What runs jobs: the protocol by which launchers start them and the service stops them, its errors, and parts of log files.

A backend holds no state that a job depends on: every method takes a handle that any process made at any time before. See
``docs/launch/estimator.md``, *A backend of your own*, and the tests that every backend passes, ``tests/launch/backends/backend_contract.py``.
Each class of errors stands for one thing to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from watchstep.errors import ConfigError, NotFoundError, WatchstepError


class BackendError(WatchstepError):
    """A backend could not do what it was asked."""


class SubmissionRejectedError(BackendError, ConfigError):
    """The backend took no job, and none of it runs: correct what was submitted. Trying the same again is of no use."""


class BackendDownError(BackendError):
    """The backend does not answer, or said that it cannot now. Nothing is known of the job by it: try again later."""


class CredentialsExpiredError(BackendError):
    """The backend refused who asks: credentials are missing, have expired, or do not suffice.

    The job goes on. Ask again once the credentials are renewed.
    """


class MissingRightError(CredentialsExpiredError):
    """The backend knows who asks, and does not allow it."""


class JobNotFoundError(BackendError, NotFoundError):
    """No job goes by this id now."""


JobState = Literal["queued", "running", "ended", "cancelled", "vanished", "unknown"]
"""
======== ===================================================================================================
queued   accepted; nothing of it runs yet
running  runs, or is being started or ended
ended    over by itself or by a signal; the exit code says how, where it is known
cancelled ended by a stop that the backend knows as one, before or after it began
vanished over, and nobody can say how: the backend knows it no more, or its id is another job's now
unknown  it cannot be seen from here; it may run
======== ===================================================================================================
"""

OVER: frozenset[str] = frozenset(("ended", "cancelled", "vanished"))
"""States of a job that will never run again."""


@dataclass(frozen=True)
class JobHandle:
    """One job, so named that no other can be taken for it. It outlives the process that made it: see `as_data`.

    Attributes:
        backend: name of the backend that it runs on; its kind, where it is registered under no other name.
        id: as people know it.
        identity: the backend's own facts that tell this job from every other that has, had or will have the same id: when
            it was submitted or started, its UID, its cluster. JSON-ready. It stays when the cluster itself starts the
            job again (requeue, back-off): that is a new attempt of the same job, which meets the run's tombstone
            if it was stopped. With the id it is all that `Backend.status`, `stop` and `kill` may need.
        details: what else finds it, as where its output lies. JSON-ready; no part of what the job is.
    """

    backend: str
    id: str
    identity: Mapping[str, Any]
    details: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "backend": self.backend,
            "id": self.id,
            "identity": dict(self.identity),
            "details": dict(self.details),
        }

    @classmethod
    def from_data(cls, data: Any) -> JobHandle:
        """Read what `as_data` gave.

        Raises:
            ConfigError: it has another form.
        """
        try:
            return cls(
                str(data["backend"]), str(data["id"]), dict(data["identity"]), dict(data.get("details") or {})
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"job {str(data)[:80]!r}: cannot be read ({error!r})", "give what JobHandle.as_data gave"
            ) from error


@dataclass(frozen=True)
class JobStatus:
    """How a job is.

    Attributes:
        state: see `JobState`.
        exit_code: negative for a signal, as in `subprocess`; None while it runs or where nobody knows. Of many
            workers, the first that is not 0.
        detail: for people: the backend's own word for the state, a reason, a node.
    """

    state: JobState
    exit_code: int | None = None
    detail: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the job will never run again."""
        return self.state in OVER

    @property
    def in_sight(self) -> bool:
        """Whether its state can be seen from here."""
        return self.state != "unknown"


@dataclass(frozen=True)
class Launch:
    """A command to run as a job.

    Attributes:
        command: program and arguments. They reach the job as they are: no shell takes them apart.
        environment: variables added to those that the backend gives every job, which override them.
        folder: the working directory, where the backend can have one that the launcher knows.
        log: file that takes its output and errors, appended; None leaves the place to the backend.
        name: what people see in the backend's lists, and what finds a job whose submission got no answer: 1 to 63 of
            a-z, 0-9 and '-', and no other launch's. Empty lets the backend choose.
        secrets: variables like those of ``environment`` that must not show in listings, manifests and logs, as
            far as the backend can help it.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    log: Path | None = None
    name: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class LogPart:
    """Some of a job's output.

    Attributes:
        data: bytes as the job wrote them, where the backend keeps them so.
        cursor: where the next part begins; give it to `Backend.logs`.
    """

    data: bytes
    cursor: str


class Backend(Protocol):
    """What runs jobs of one kind.

    Every call returns within half a minute, and raises what it could not find out:

    - `BackendDownError`: it does not answer;
    - `CredentialsExpiredError`: it refuses who asks.

    A job that is over is no error: `stop` and `kill` of it do nothing, and tell how it is.
    """

    kind: ClassVar[str]
    """By what it is registered with the service, and named in ``--job KIND:ID``."""

    poll_seconds: ClassVar[float]
    """How long an answer of `status` serves the service; asking more often would burden what runs the jobs."""

    def submit(self, launch: Launch) -> JobHandle:
        """Start a job. Either a handle is returned, or nothing of it runs and nothing will.

        A submission that got no answer is looked for by ``launch.name`` before it is given up; where that fails too,
        `BackendDownError` names it.

        Raises:
            SubmissionRejectedError: it cannot be started as it is.
        """

    def status(self, job: JobHandle) -> JobStatus:
        """How this very job is; "vanished" where its id means another one now."""

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """Output from a place on, or from the first that is kept; empty where there is no more now.

        What was written before `status` said that the job is over can be read by then.
        """

    def stop(self, job: JobHandle) -> JobStatus:
        """Ask the job to end (SIGTERM, or the like), once it is sure that it is this very job; how it is then."""

    def kill(self, job: JobHandle) -> JobStatus:
        """End the job, once it is sure that it is this very job; how it is then."""

    def jobs(self) -> list[JobHandle]:
        """Jobs that launchers of Watchstep submitted here and that are not over, as far as this user can see them."""

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - as people call it
        """The job that goes by this id now, whoever started it.

        Raises:
            JobNotFoundError: none does.
        """

    def settled(self, job: JobHandle) -> JobHandle:
        """The same job with its identity in one spelling, so that no job can be bound twice under two.

        Raises:
            ConfigError: the identity is not one of this kind's, or the id is another's.
        """


@runtime_checkable
class FindsByName(Protocol):
    """A backend that can say for sure whether a launch was taken, after whoever submitted it has ended; each of ours can."""

    submission_seconds: ClassVar[float]
    """So long a submission may go on after its launcher has ended. 0 where the backend takes no name twice."""

    def find(self, name: str) -> JobHandle | None:
        """The job of the launch with this name, over or not; None where there is none. Nobody submits it meanwhile.

        Raises:
            BackendError: nobody knows.
        """


@runtime_checkable
class ChecksOwner(Protocol):
    """A backend that can say whether a job may be stopped from here, without a signal that tries it."""

    def check_may_stop(self, job: JobHandle) -> None:
        """See that whoever runs this process may stop the job.

        Raises:
            BackendError: it is another's.
        """


class BackendModel(BaseModel):
    """A backend is its settings: what one process writes down, another reads back and has the same backend.

    Clients and the like are private attributes, made when they are first used; so are imports of what an extra
    brings. A field is a setting that users give: ``Slurm(partition="gpu", nodes=2)``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    shares_files: ClassVar[bool] = False
    """Whether its jobs see this machine's files and interpreter, at the same places."""


LARGEST_PART = 1024 * 1024


def read_part(path: Path, cursor: str) -> LogPart:
    """What a file holds from a place on, a megabyte at most; empty where it is not there yet.

    Raises:
        BackendDownError: it is there and cannot be read.
    """
    start = int(cursor) if cursor.isdecimal() else 0
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(LARGEST_PART)
    except FileNotFoundError:
        return LogPart(b"", cursor)
    except OSError as error:
        raise BackendDownError(
            f"log {path}: cannot be read ({error.strerror})",
            "see to its permissions, or read it as its owner",
        ) from error
    return LogPart(data, str(start + len(data)))
