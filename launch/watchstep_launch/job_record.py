"""The record of a launched job, by which another process can find it. It contains no secret.

Ending a job, and polling the status of many jobs.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import check_name
from watchstep.platform.process import default_folder
from watchstep_launch.backend import Backend, JobHandle, JobStatus
from watchstep_launch.relaunch import Relaunch
from watchstep_launch.service_location import ServiceReference


@dataclass(frozen=True)
class JobRecord:
    """A launched job.

    Attributes:
        project: the run's project.
        run: the run's id.
        attempt: the attempt that it was launched as.
        store: URL of the store.
        handle: the job.
        kind: kind of its backend.
        settings: settings of its backend.
        service: the service that evaluates the run; None if there is none.
        relaunch: how it is launched again after a stop; None if it is not.
    """

    project: str
    run: str
    attempt: str
    store: str
    handle: JobHandle
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    service: ServiceReference | None = None
    relaunch: Relaunch | None = None

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        service = None if self.service is None else asdict(self.service)
        fields = {name: getattr(self, name) for name in ("project", "run", "attempt", "store", "kind")}
        relaunch = None if self.relaunch is None else self.relaunch.as_data()
        settings, handle = dict(self.settings), self.handle.as_data()
        return {**fields, "settings": settings, "handle": handle, "judge": service, "relaunch": relaunch}

    @classmethod
    def from_data(cls, data: Any) -> JobRecord:
        """Parse the result of `as_data`.

        Raises:
            ConfigError: the data has another form.
        """
        try:
            service = ServiceReference(**data["judge"]) if data.get("judge") else None
            project, run, attempt, store = (
                str(data[name]) for name in ("project", "run", "attempt", "store")
            )
            handle = JobHandle.from_data(data["handle"])
            relaunch = Relaunch.from_data(data["relaunch"]) if data.get("relaunch") else None
            kind, settings = str(data["kind"]), dict(data["settings"])
            return cls(project, run, attempt, store, handle, kind, settings, service, relaunch)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the job record cannot be parsed ({error!r})", "pass the result of JobRecord.as_data"
            ) from error

    def save(self) -> Path:
        """Save it for `load`. The newest launch of a run replaces an earlier one.

        Raises:
            ConfigError: the folder cannot be written.
        """
        path = record_path(self.project, self.run)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps(self.as_data(), indent=1), encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise ConfigError(
                f"record {path}: cannot be written ({error.strerror})",
                "set WATCHSTEP_JOBS to another folder",
            ) from error
        return path


def load(run: str, project: str = "default") -> JobRecord:
    """Return the newest launch of a run from this machine.

    Raises:
        NotFoundError: no launch is known here.
        ConfigError: the record cannot be read.
    """
    path = record_path(project, run)
    try:
        return JobRecord.from_data(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise NotFoundError(
            f"run {project}/{run}: no launch is known on this machine",
            f"look in {path.parent}, or bind the job with 'watchstep attach'",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"record {path}: cannot be read ({error})", "remove it, and attach to the job again"
        ) from error


def record_path(project: str, run: str) -> Path:
    """Return the file for the newest launch of a run."""
    return default_folder() / "launched" / f"{check_name('project', project)}.{check_name('run', run)}.json"


def job_name(run: str) -> str:
    """Return a unique job name that includes the run's id."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:40]
    return f"ws-{plain}-{secrets.token_hex(4)}" if plain else f"ws-{secrets.token_hex(4)}"


_POLL_SECONDS = 0.1
_KILL_SECONDS = 30.0


def end(
    backend: Backend, job: JobHandle, grace_seconds: float, pause: Callable[[float], None] = time.sleep
) -> JobStatus:
    """Request a job's end, wait for the grace time, then kill it. Returns its final status. Does nothing to a job that is over.

    Raises:
        BackendError: the backend does not answer, or refuses; requests already made remain in effect.
    """
    status = backend.stop(job)
    if not _over_within(backend, job, grace_seconds, pause) and not status.is_over:
        backend.kill(job)
        _over_within(backend, job, _KILL_SECONDS, pause)
    return backend.status(job)


def _over_within(backend: Backend, job: JobHandle, seconds: float, pause: Callable[[float], None]) -> bool:
    deadline = time.monotonic() + seconds
    interval = max(_POLL_SECONDS, backend.poll_seconds)
    while not backend.status(job).is_over:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        pause(min(interval, left))
    return True


_MAX_JOBS = 10_000
_SILENT_SECONDS = 15.0
"""How long a backend that timed out is not queried during an evaluation."""


class JobPolling:
    """Answers of `Backend.status`, each cached for the backend's ``poll_seconds``. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, str, str], tuple[float, JobStatus]] = {}
        self._silent: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def recent(self, job: JobHandle) -> JobStatus | None:
        """Return a job's last status if it is not older than the time for which a silent backend is skipped."""
        with self._lock:
            entry = self._seen.get(_key(job))
        return entry[1] if entry is not None and self._clock() - entry[0] < _SILENT_SECONDS else None

    def note_silence(self, project: str, backend: str) -> None:
        """Note that a backend timed out."""
        with self._lock:
            self._silent[project, backend] = self._clock() + _SILENT_SECONDS

    def is_silent(self, project: str, backend: str) -> bool:
        """Whether a backend timed out within the last `_SILENT_SECONDS`."""
        with self._lock:
            if self._clock() < self._silent.get((project, backend), 0.0):
                return True
            self._silent.pop((project, backend), None)
            return False

    def status(self, backend: Backend, job: JobHandle) -> JobStatus:
        """Return a job's status, which may be up to ``poll_seconds`` old.

        Raises:
            BackendError: as for `Backend.status`; errors are not cached.
        """
        if not backend.poll_seconds:
            return backend.status(job)
        key = _key(job)
        with self._lock:
            entry = self._seen.get(key)
        if entry is not None and self._clock() - entry[0] < backend.poll_seconds:
            return entry[1]
        status = backend.status(job)
        with self._lock:
            if len(self._seen) >= _MAX_JOBS:
                self._seen.clear()
            self._seen[key] = (self._clock(), status)
        return status


def _key(job: JobHandle) -> tuple[str, str, str]:
    return job.backend, job.id, repr(sorted(job.identity.items()))
