"""Ending a job from the launching side, where no service does it: its backend's stop, then its kill."""

from __future__ import annotations

import time
from collections.abc import Callable

from watchstep_launch.backend import Backend, JobHandle, JobStatus

_LOOK_SECONDS = 0.1
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
    look = max(_LOOK_SECONDS, backend.poll_seconds)
    while not backend.status(job).is_over:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        pause(min(look, left))
    return True
