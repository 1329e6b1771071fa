"""How jobs were when they were last looked at, so that no cluster is asked more often than it bears."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from watchstep_services.estimator.backend import Backend, JobHandle, JobStatus

_MOST = 10_000


class JobLooks:
    """Answers of `Backend.status`, each kept for the backend's own time. Safe from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, str, str], tuple[float, JobStatus]] = {}
        self._lock = threading.Lock()

    def status(self, backend: Backend, job: JobHandle) -> JobStatus:
        """How a job is, or was a moment ago.

        Raises:
            BackendError: as of `Backend.status`; nothing is kept of it.
        """
        if not backend.poll_seconds:
            return backend.status(job)
        named = (job.backend, job.id, repr(sorted(job.identity.items())))
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
