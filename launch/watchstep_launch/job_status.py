"""Ending a job, and asking for the status of many jobs."""

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
    """Ask a job to end, wait so long, then kill it; how it is in the end. Nothing is done to a job that is over.

    Raises:
        BackendError: the backend does not answer, or refuses; what was asked stays asked.
    """
    status = backend.stop(job)
    if not _over_within(backend, job, grace_seconds, pause) and not status.is_over:
        backend.kill(job)
        _over_within(backend, job, _KILL_SECONDS, pause)
    return backend.status(job)


def _over_within(backend: Backend, job: JobHandle, seconds: float, pause: Callable[[float], None]) -> bool:
    deadline = time.monotonic() + seconds
    look = max(_POLL_SECONDS, backend.poll_seconds)
    while not backend.status(job).is_over:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        pause(min(look, left))
    return True


_MOST = 10_000
_SILENT_SECONDS = 15.0
"""So long a backend that did not answer in time is not asked where an evaluation waits."""


class JobLooks:
    """Answers of `Backend.status`, each kept for the backend's own time. Safe from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, str, str], tuple[float, JobStatus]] = {}
        self._silent: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def recent(self, job: JobHandle) -> JobStatus | None:
        """How a job was when its backend answered last, if that was within the time for which a silent backend is not asked."""
        with self._lock:
            found = self._seen.get(_named(job))
        return found[1] if found is not None and self._clock() - found[0] < _SILENT_SECONDS else None

    def note_silence(self, project: str, backend: str) -> None:
        """A backend has not answered in time."""
        with self._lock:
            self._silent[project, backend] = self._clock() + _SILENT_SECONDS

    def is_silent(self, project: str, backend: str) -> bool:
        """Whether a backend has not answered in time a moment ago."""
        with self._lock:
            if self._clock() < self._silent.get((project, backend), 0.0):
                return True
            self._silent.pop((project, backend), None)
            return False

    def status(self, backend: Backend, job: JobHandle) -> JobStatus:
        """How a job is, or was a moment ago.

        Raises:
            BackendError: as of `Backend.status`; nothing is kept of it.
        """
        if not backend.poll_seconds:
            return backend.status(job)
        named = _named(job)
        with self._lock:
            held = self._seen.get(named)
        if held is not None and self._clock() - held[0] < backend.poll_seconds:
            return held[1]
        status = backend.status(job)
        with self._lock:
            if len(self._seen) >= _MOST:
                self._seen.clear()
            self._seen[named] = (self._clock(), status)
        return status


def _named(job: JobHandle) -> tuple[str, str, str]:
    return job.backend, job.id, repr(sorted(job.identity.items()))
