"""The protocol between launchers, the service and what runs jobs; its errors; reading parts of log files.

A backend keeps no state that a job depends on: every method takes a handle, which any process may have created earlier. See
``docs/launch/estimator.md``, *Custom backends*, and the tests that every backend passes, ``tests/launch/backends/backend_contract.py``.
Each error class calls for a different reaction.

Registry of backend kinds, and the file that stores backends.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, ValidationError

from watchstep.errors import ConfigError, NotFoundError, WatchstepError


class BackendError(WatchstepError):
    """A backend could not complete a request."""


class SubmissionRejectedError(BackendError, ConfigError):
    """The backend rejected the submission, and nothing of the job runs. Correct what was submitted; a retry fails again."""


class BackendDownError(BackendError):
    """The backend does not answer, or reports that it is unavailable. The job's status is unknown: try again later."""


class CredentialsExpiredError(BackendError):
    """The backend refused the credentials: they are missing, have expired, or do not suffice.

    The job continues. Retry once the credentials are renewed.
    """


class MissingRightError(CredentialsExpiredError):
    """The credentials are valid, but do not permit the request."""


class JobNotFoundError(BackendError, NotFoundError):
    """No job has this id now."""


JobState = Literal["queued", "running", "ended", "cancelled", "vanished", "unknown"]
"""
======== ===================================================================================================
queued   accepted; nothing of it runs yet
running  runs, or is being started or ended
ended    finished by itself or by a signal; the exit code, if known, tells which
cancelled ended by a stop that the backend recognizes as one, before or after it started
vanished finished with unknown result: the backend no longer knows it, or another job has its id now
unknown  its state cannot be queried from here; it may be running
======== ===================================================================================================
"""

OVER: frozenset[str] = frozenset(("ended", "cancelled", "vanished"))
"""States of a job that will never run again."""


@dataclass(frozen=True)
class JobHandle:
    """One job, identified so that no other job is mistaken for it. It outlives the process that created it: see `as_data`.

    Attributes:
        backend: name of the job's backend; the backend's kind if it is registered under no other name.
        id: id of the job as shown to users.
        identity: the backend's own facts that distinguish this job from every other job with the same id, past and future:
            time of submission or start, UID, cluster. JSON-ready. It stays the same when the cluster itself restarts the
            job (requeue, back-off): that is a new attempt of the same job, which finds the run's tombstone if the run was
            stopped. `Backend.status`, `stop` and `kill` may need nothing but the id and the identity.
        details: further facts, such as the location of its output. JSON-ready; not part of the job's identity.
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
        """Parse the result of `as_data`.

        Raises:
            ConfigError: the data has another form.
        """
        try:
            return cls(
                str(data["backend"]), str(data["id"]), dict(data["identity"]), dict(data.get("details") or {})
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"job {str(data)[:80]!r}: cannot be parsed ({error!r})",
                "pass the result of JobHandle.as_data",
            ) from error


@dataclass(frozen=True)
class JobStatus:
    """A job's status.

    Attributes:
        state: see `JobState`.
        exit_code: negative for a signal, as in `subprocess`; None while the job runs or if it is unknown. Of several
            workers, the first that is not 0.
        detail: for people: the backend's own name of the state, a reason, a node.
    """

    state: JobState
    exit_code: int | None = None
    detail: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the job will never run again."""
        return self.state in OVER

    @property
    def is_visible(self) -> bool:
        """Whether the job's state can be queried from here."""
        return self.state != "unknown"


@dataclass(frozen=True)
class Launch:
    """A command to run as a job.

    Attributes:
        command: program and arguments. They reach the job unchanged; no shell splits them.
        environment: variables added to those that the backend sets for every job; they override those.
        folder: the working directory, on backends that share the launcher's file system.
        log: file to which the job's output and errors are appended; None leaves the choice to the backend.
        name: name in the backend's lists, by which a job is found if its submission got no answer: 1 to 63 characters of
            a-z, 0-9 and '-', unique among launches. If empty, the backend chooses one.
        secrets: variables like those of ``environment`` that must not appear in listings, manifests and logs, as
            far as the backend can avoid it.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    log: Path | None = None
    name: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class LogPart:
    """A part of a job's output.

    Attributes:
        data: bytes as the job wrote them, if the backend keeps them so.
        cursor: position of the next part; pass it to `Backend.logs`.
    """

    data: bytes
    cursor: str


class Backend(Protocol):
    """What runs jobs of one kind.

    Every call returns within half a minute, and raises an error for what it could not determine:

    - `BackendDownError`: the backend does not answer;
    - `CredentialsExpiredError`: the backend refuses the credentials.

    A finished job is not an error: `stop` and `kill` do nothing, and return its status.
    """

    kind: ClassVar[str]
    """Name of the kind, for registration with the service and in ``--job KIND:ID``."""

    poll_seconds: ClassVar[float]
    """How long the service reuses an answer of `status`; more frequent requests would burden the backend."""

    def submit(self, launch: Launch) -> JobHandle:
        """Start a job. Returns a handle, or raises an error; after an error nothing of the job runs, now or later.

        A submission without answer is searched for by ``launch.name``. If that fails too, `BackendDownError` includes the
        name.

        Raises:
            SubmissionRejectedError: the launch cannot be started as it is.
        """

    def status(self, job: JobHandle) -> JobStatus:
        """Return the job's status: "vanished" if its id means another job now."""

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """Return output after a cursor, by default from the beginning of what is kept; empty if there is no more yet.

        Once `status` reports that the job is over, all of its output can be read.
        """

    def stop(self, job: JobHandle) -> JobStatus:
        """Request the job's end (SIGTERM or similar) after verifying its identity. Returns its status afterwards."""

    def kill(self, job: JobHandle) -> JobStatus:
        """End the job after verifying its identity. Returns its status afterwards."""

    def jobs(self) -> list[JobHandle]:
        """List jobs that Watchstep submitted and that are not over, as far as this user can see them."""

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - as people call it
        """Return the job that has this id now, whoever started it.

        Raises:
            JobNotFoundError: there is no such job.
        """

    def settled(self, job: JobHandle) -> JobHandle:
        """Return the same job with its identity in canonical form, so that no job can be bound twice under two spellings.

        Raises:
            ConfigError: the identity has not the form of this kind's, or does not match the id.
        """


@runtime_checkable
class FindsByName(Protocol):
    """A backend that can determine whether a launch was accepted after its launcher has ended. All built-in backends can."""

    submission_seconds: ClassVar[float]
    """How long a submission may still be in progress after its launcher has ended. 0 if the backend rejects duplicate names."""

    def find(self, name: str) -> JobHandle | None:
        """Return the job of the launch with this name, over or not; None if there is none. Must not run during its submission.

        Raises:
            BackendError: the answer cannot be determined.
        """


@runtime_checkable
class ChecksOwner(Protocol):
    """A backend that can check the permission to stop a job without sending a signal."""

    def check_may_stop(self, job: JobHandle) -> None:
        """Check that the user of this process may stop the job.

        Raises:
            BackendError: the job belongs to another user.
        """


class BackendModel(BaseModel):
    """A backend consists of its settings: one process saves them, and another process restores the same backend from them.

    Clients and similar objects are private attributes, created on first use, as are imports of packages that an extra
    installs. Each field is a setting for users: ``Slurm(partition="gpu", nodes=2)``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    shares_files: ClassVar[bool] = False
    """Whether jobs see this machine's files and interpreter under the same paths."""


LARGEST_PART = 1024 * 1024


def read_part(path: Path, cursor: str) -> LogPart:
    """Return a file's content after a cursor, at most one MiB; empty if the file does not exist yet.

    Raises:
        BackendDownError: the file exists and cannot be read.
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
            "check its permissions, or read it as its owner",
        ) from error
    return LogPart(data, str(start + len(data)))


KINDS: dict[str, tuple[str, str]] = {
    "command": ("watchstep_launch.backends.command", "Command"),
    "kubernetes": ("watchstep_launch.backends.kubernetes.backend", "Kubernetes"),
    "local": ("watchstep_launch.backends.local.backend", "Local"),
    "ray": ("watchstep_launch.backends.ray.backend", "Ray"),
    "sagemaker": ("watchstep_launch.backends.aws.sagemaker", "SageMaker"),
    "slurm": ("watchstep_launch.backends.slurm.backend", "Slurm"),
}
"""Kind → module and class. The class is a `BackendModel` that implements `Backend`."""

IN_SERVICE = frozenset(KINDS) - {"command"}
"""Kinds that admins may register with a service. User-defined commands run on the launcher's side only: permission to
register a backend must not imply permission to run programs on the service's machine."""


def backend_class(kind: str) -> type[BackendModel]:
    """Return the class of a kind.

    Raises:
        ConfigError: the kind is unknown, or its requirements are not installed.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown backend kind {kind!r}", f"use one of: {', '.join(sorted(KINDS))}")
    module, name = KINDS[kind]
    try:
        loaded: type[BackendModel] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            f"backend kind {kind!r} is not installed ({error})", f"pip install 'watchstep[{kind}]'"
        ) from error
    return loaded


def checked_settings(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they are stored: JSON-ready, without default values.

    Raises:
        ConfigError: the kind is unknown or not installed, or the settings are invalid.
    """
    return _opened(kind, settings).model_dump(mode="json", exclude_defaults=True)


def open_backend(kind: str, settings: Mapping[str, Any]) -> Backend:
    """Return the backend with these settings.

    Raises:
        ConfigError: the kind is unknown or not installed, or the settings are invalid.
    """
    opened: Any = _opened(kind, settings)
    backend: Backend = opened
    return backend


def _opened(kind: str, settings: Mapping[str, Any]) -> BackendModel:
    try:
        return backend_class(kind).model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "settings"
        raise ConfigError(
            f"{place}: {first['msg']}", f"see the settings of a backend of kind {kind}"
        ) from error


BACKENDS_FILE = "backends.json"


@dataclass(frozen=True)
class StoredBackend:
    """A backend's kind and settings."""

    kind: str
    settings: Mapping[str, Any]


def read(file: Path) -> dict[str, StoredBackend]:
    """Return backends by name; empty if the file does not exist.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        return {
            str(name): StoredBackend(str(entry["kind"]), dict(entry["settings"]))
            for name, entry in entries.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}: cannot be read ({error!r})", "remove it; the next launch of a job creates a new one"
        ) from error


def put(file: Path, kind: str, settings: Mapping[str, Any]) -> str:
    """Add a backend to the file. Returns the name under which its jobs are bound; different settings get different names.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    encoded = json.dumps(dict(settings), sort_keys=True)
    name = kind if not settings else f"{kind.replace('_', '-')}-{sha256(encoded.encode()).hexdigest()[:8]}"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (file.parent / f".{file.name}.lock").open("w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            backends = read(file)
            if name not in backends:
                backends[name] = StoredBackend(kind, dict(settings))
                partial = file.with_suffix(".partial")
                descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "w", encoding="utf-8") as writing:
                    json.dump({key: asdict(backend) for key, backend in backends.items()}, writing, indent=1)
                partial.replace(file)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written ({error.strerror})", "check the permissions of its folder"
        ) from error
    return name
