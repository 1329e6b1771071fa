"""What a kind of job must be able to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

JobState = Literal["running", "gone", "unknown"]


@dataclass(frozen=True)
class JobHandle:
    """One job, so named that no other can be taken for it.

    Attributes:
        backend: name of the backend that it runs on.
        id: as people know it.
        identity: what tells it from a later job with the same id, JSON-ready.
    """

    backend: str
    id: str
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class JobStatus:
    """How a job is.

    Attributes:
        state: unknown where it cannot be seen from here.
        exit_code: negative for a signal, as in `subprocess`; None while it runs or where nobody knows.
        detail: for people.
    """

    state: JobState
    exit_code: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Launch:
    """A command to run as a job.

    Attributes:
        command: program and arguments.
        environment: the whole environment.
        folder: the working directory.
        log: file that takes its output and errors, appended.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    log: Path


class Backend(Protocol):
    """A kind of job. All calls return at once; a job that is gone is no error."""

    def submit(self, launch: Launch) -> JobHandle:
        """Start a job.

        Raises:
            ConfigError: it cannot be started.
        """

    def status(self, job: JobHandle) -> JobStatus:
        """How the job is."""

    def stop(self, job: JobHandle) -> JobStatus:
        """Ask the job to end (SIGTERM, or the like), if it is this very job."""

    def kill(self, job: JobHandle) -> JobStatus:
        """End the job, if it is this very job."""
