"""Whether a launch was taken whose launcher ended while it submitted."""

from __future__ import annotations

import time

from watchstep.errors import NotFoundError
from watchstep.format.layout import ATTEMPTS
from watchstep.reading.run import open_run
from watchstep_launch.backend import Backend, FindsByName, JobHandle
from watchstep_launch.errors import BackendDownError, JobNotFoundError
from watchstep_launch.job_record import JobRecord
from watchstep_launch.relaunch import Intent

_LOOK_SECONDS = 1.0


def taken(backend: Backend, record: JobRecord, intent: Intent) -> JobHandle | None:
    """The job that somebody was about to submit, over or not; None where it is sure that there is none, and will be none.

    Waits as long as the submission may still go on (`FindsByName.submission_seconds`).

    Raises:
        BackendDownError: nobody knows, or it ran and the backend has forgotten it.
        BackendError: the backend does not answer, or refuses.
    """
    while True:
        ended = intent.may_go_on_for(_submission_seconds(backend)) <= 0.0
        found = _named(backend, intent.name)
        if found is not None:
            return found
        if ended:
            break
        time.sleep(min(_LOOK_SECONDS, max(0.0, intent.may_go_on_for(_submission_seconds(backend)))))
    if _has_recorded(record, intent.attempt):
        raise BackendDownError(
            f"job {intent.name!r} ran as attempt {intent.attempt} of run {record.project}/{record.run}, and"
            f" {backend.kind} shows it no more",
            "see its run for what it came to; launch the run anew where it is not over",
        )
    return None


def came_through(backend: Backend, intent: Intent) -> JobHandle | None:
    """The job of an earlier submission, where a backend that takes no name twice has refused this one; None where there is none.

    Raises:
        BackendError: the backend does not answer, or refuses.
    """
    if not isinstance(backend, FindsByName) or backend.submission_seconds:
        return None
    found = backend.find(intent.name)
    return None if found is None or backend.status(found).is_over else found


def _named(backend: Backend, name: str) -> JobHandle | None:
    if isinstance(backend, FindsByName):
        return backend.find(name)
    for job in backend.jobs():
        if name in (job.id, job.identity.get("name"), job.details.get("name")):
            return job
    try:
        return backend.reattach(name)
    except JobNotFoundError:
        pass
    raise BackendDownError(
        f"job {name!r} was about to be submitted when its launcher ended, and may have been taken",
        "look for it by its name: attach to it where it runs, or launch the run anew where it does not",
    )


def _submission_seconds(backend: Backend) -> float:
    return backend.submission_seconds if isinstance(backend, FindsByName) else 0.0


def _has_recorded(record: JobRecord, attempt: str) -> bool:
    """Whether a program was started as this attempt: on most backends it is known for longer than the job."""
    try:
        run = open_run(f"{record.store}/{record.project}/{record.run}")
    except NotFoundError:
        return False
    names = [entry.key.rsplit("/", 1)[-1].removesuffix(".json") for entry in run.store.entries(ATTEMPTS)]
    return any(name == attempt or name.startswith(f"{attempt}-r") for name in names)
