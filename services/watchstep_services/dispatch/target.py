"""What a stop is aimed at: the run, its attempt, its job, and whether they are over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import TypeVar

from watchstep.errors import ConfigError, StoreError
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.stopping import EXIT_STOPPED
from watchstep.store.store import Store
from watchstep_launch.backend import Backend, BackendDownError, BackendError, JobHandle, JobStatus
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.store_location import StorePlace
from watchstep_services.db.models import Attempt, Project, RunRow
from watchstep_services.runs import attempts
from watchstep_services.runs.control import ask, change, mirror
from watchstep_services.service.context import Service
from watchstep_services.tenancy.backends import bound_job

STATUS_SECONDS = 5.0
"""So long a stop waits for a job's backend before it asks the workers: most answer within a second, and one that hangs does so
for half a minute."""

REFUSED = (StoreError, ConfigError)
"""What is raised where a store does not answer, refuses, or cannot be opened."""

_Came = TypeVar("_Came")


@dataclass(frozen=True)
class StopTarget:
    """An attempt to stop.

    Attributes:
        run: its run.
        attempt: its row.
        place: of its project.
        opened: where the run lies, or why that cannot be opened.
        job: the bound job, if any.
        status: how the job is; None without one.
        backend: what the job runs on; None where this process knows no such backend.
        trouble: why the backend could not be asked now; the status is unknown.
        unread: the store does not say now how many workers the attempt has, and what they do when they are asked.
        hurried: the backend was not waited for; the status is unknown.
    """

    run: RunRow
    attempt: Attempt
    place: StorePlace
    opened: Store | StoreError | ConfigError
    job: JobHandle | None
    status: JobStatus | None
    backend: Backend | None
    trouble: BackendError | None = None
    unread: bool = False
    hurried: bool = False

    @property
    def run_store(self) -> Store:
        """Where the run lies.

        Raises:
            StoreError, ConfigError: it cannot be opened.
        """
        if isinstance(self.opened, Store):
            return self.opened
        raise self.opened

    @property
    def listens(self) -> bool:
        """Whether its workers do something when they are asked to stop, as far as anybody can know."""
        return self.unread or self.attempt.on_stop != "ignore"

    @property
    def is_alone(self) -> bool:
        """Whether the attempt has one worker, as far as anybody can know."""
        return not self.unread and self.attempt.world_size <= 1

    @property
    def ends_complete(self) -> bool:
        """Whether every worker has said how it ended."""
        return len(self.attempt.ends) >= max(1, self.attempt.world_size)

    @property
    def ended_by_itself(self) -> bool:
        """Whether every worker trained to its own end."""
        return self.ends_complete and all(end["state"] == "completed" for end in self.attempt.ends.values())

    @property
    def failed_by_itself(self) -> bool:
        """Whether a worker has said that it failed."""
        return any(end["state"] == "failed" for end in self.attempt.ends.values())

    @property
    def obeyed(self) -> bool:
        """Whether a worker says that it stopped because it was asked to, or the exit code of its job says so."""
        code = None if self.status is None else self.status.exit_code
        return code == EXIT_STOPPED or any(end["state"] == "stopped" for end in self.attempt.ends.values())

    @property
    def is_over(self) -> bool:
        """Whether the job is gone or, where none is bound, every worker has ended."""
        if self.status is None or not self.status.in_sight:
            return self.ends_complete
        return self.status.is_over

    @property
    def in_sight(self) -> bool:
        """Whether a job is bound, and this process can see how it is."""
        return self.status is not None and self.status.in_sight


def load_target(service: Service, run_id: int, attempt: str, *, hurried: bool = False) -> StopTarget:
    """Find what a stop is aimed at, and how its job is now, if its backend can say so. No store is waited for long.

    Args:
        service: the service.
        run_id: of the run.
        attempt: its name.
        hurried: where its workers listen, the backend is waited for `STATUS_SECONDS` at the most.
    """
    with service.database.read() as session:
        run = session.get_one(RunRow, run_id)
        place = session.get_one(Project, run.project).place
        bound = bound_job(session, run_id, attempt)
    opened = _open(service, place, run.run)
    row, unread = _load_attempt(service, place, opened, (run_id, attempt))
    target = StopTarget(run, row, place, opened, None, None, None, unread=unread)
    if bound is None:
        return target
    backend = service.backend_of(bound.kind, bound.settings)
    target = replace(target, job=bound.job, backend=backend)
    if backend is None:
        detail = f"this service has no backend of kind {bound.kind!r}"
        return replace(target, status=JobStatus("unknown", detail=detail))
    try:
        if hurried and target.listens:
            return replace(target, status=_status_soon(service, run.project, backend, bound.job))
        return replace(target, status=backend.status(bound.job))
    except _SlowBackendError as error:
        return replace(target, status=JobStatus("unknown", detail=error.what), trouble=error, hurried=True)
    except BackendError as error:
        return replace(target, status=JobStatus("unknown", detail=error.what), trouble=error)


class _SlowBackendError(BackendDownError):
    """It has not answered yet."""


def _status_soon(service: Service, project: str, backend: Backend, job: JobHandle) -> JobStatus:
    """How a job is.

    Raises:
        BackendError: as of `Backend.status`, or it has not answered in time.
    """
    asked = service.status_threads.submit(project, functools.partial(backend.status, job), job.backend)
    if not wait([asked], STATUS_SECONDS).done:
        asked.cancel()
        raise _SlowBackendError(
            f"backend {job.backend}: no answer for {STATUS_SECONDS:g} s",
            "see whether it can be reached from here; it is tried again",
        )
    return asked.result()


def _open(service: Service, place: StorePlace, run: str) -> Store | StoreError | ConfigError:
    try:
        return service.stores.of_run(place, run)
    except REFUSED as error:
        return error


def _load_attempt(
    service: Service, place: StorePlace, opened: Store | StoreError | ConfigError, of: tuple[int, str]
) -> tuple[Attempt, bool]:
    """The row of an attempt, and whether its document could not be read."""
    row = attempts.described(service.database, *of)
    if row is not None:
        return row, False
    if isinstance(opened, Store):
        try:
            row = service.patience.ask_now(
                place.registration,
                lambda: attempts.load(service.database, opened, *of),
                service.settings.store_wait_seconds,
            )
        except StoreError:
            pass  # whoever needs the store next is told
        else:
            return row, False
    return attempts.undescribed(service.database, *of), True


def at_store(service: Service, target: StopTarget, work: Callable[[Store], _Came]) -> _Came:
    """What work at a target's store comes to. A stop waits only so long for that: there are other ways to the job.

    Raises:
        StoreError, ConfigError: the store cannot be opened, refused, or has not answered by then.
    """
    run_store = target.run_store
    return service.patience.ask_now(
        target.place.registration, lambda: work(run_store), service.settings.store_wait_seconds
    )


def write_control(service: Service, target: StopTarget, stop: StopRequest) -> ControlDocument:
    """Ask all workers to stop: in the database, which answers announcements, and on the store.

    An attempt that has been asked is not asked for another step: its workers must agree on one.

    Raises:
        StoreError, ConfigError: the store refused. The database has the stop already, and an action that brings it to the
            store once that answers.
    """
    with service.database.write() as session:
        change(session, target.run.id, lambda document: _with(document, stop))
    failpoint("control.in_database", target.run.id)
    try:
        control = at_store(service, target, lambda run_store: mirror(service, target.run.id, run_store))
    except REFUSED:
        with service.database.write() as session:
            ask(session, target.run.id, lambda document: document)
        raise
    failpoint("control.on_store", target.run.id)
    return control


def _with(document: ControlDocument, stop: StopRequest) -> ControlDocument:
    asked = document.stop is not None and document.stop.attempt == stop.attempt
    return document if asked else document.with_stop(stop)
