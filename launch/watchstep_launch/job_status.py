"""Ending a job, and polling the status of many jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from watchstep_launch.backend import Backend, JobHandle, JobStatus

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
