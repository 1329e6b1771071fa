"""The target of a stop: the run, its attempt, its job, and whether they are over."""

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
from watchstep_services.db.models import Attempt, RunRow
from watchstep_services.runs import attempts
from watchstep_services.runs.control import change, mirror, request_change
from watchstep_services.service.context import Service
from watchstep_services.tenancy import bound_job

STATUS_SECONDS = 5.0
"""Timeout of a stop's request to a job's backend before the workers are requested to stop. Most backends answer within a second; one
that hangs does so for half a minute."""

REFUSED = (StoreError, ConfigError)
"""Errors of a store that does not answer, refuses, or cannot be opened."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class StopTarget:
    """An attempt to stop.

    Attributes:
        run: its run.
        attempt: its row.
        place: the location of the run.
        opened: the run's store, or why it cannot be opened.
        job: the bound job, if any.
        status: status of the job; None without a job.
        backend: backend of the job; None if this process has none of that kind.
        trouble: why the backend did not answer; the status is unknown.
        unread: the attempt's document cannot be read now, so its world size and its reaction to requests are unknown.
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
        """The run's store.

        Raises:
            StoreError, ConfigError: it cannot be opened.
        """
        if isinstance(self.opened, Store):
            return self.opened
        raise self.opened

    @property
    def listens(self) -> bool:
        """Whether its workers react to stop requests, as far as is known."""
        return self.unread or self.attempt.on_stop != "ignore"

    @property
    def is_alone(self) -> bool:
        """Whether the attempt has one worker, as far as is known."""
        return not self.unread and self.attempt.world_size <= 1

    @property
    def ends_complete(self) -> bool:
        """Whether every worker has reported its end."""
        return len(self.attempt.ends) >= max(1, self.attempt.world_size)

    @property
    def ended_by_itself(self) -> bool:
        """Whether every worker completed its training."""
        return self.ends_complete and all(end["state"] == "completed" for end in self.attempt.ends.values())

    @property
    def failed_by_itself(self) -> bool:
        """Whether a worker reported a failure."""
        return any(end["state"] == "failed" for end in self.attempt.ends.values())

    @property
    def applied(self) -> bool:
        """Whether the workers applied the request: one reported so, or the job's exit code shows it."""
        code = None if self.status is None else self.status.exit_code
        return code == EXIT_STOPPED or any(end["state"] == "stopped" for end in self.attempt.ends.values())

    @property
    def is_over(self) -> bool:
        """Whether the job is gone or, without a job, every worker has ended."""
        if self.status is None or not self.status.is_visible:
            return self.ends_complete
        return self.status.is_over

    @property
    def is_visible(self) -> bool:
        """Whether a job is bound, and its status is known."""
        return self.status is not None and self.status.is_visible


def load_target(service: Service, run_id: int, attempt: str, *, hurried: bool = False) -> StopTarget:
    """Find the target of a stop and the status of its job. Stores are not waited for longer than `store_wait_seconds`.

    Args:
        service: the service.
        run_id: id of the run.
        attempt: name of the attempt.
        hurried: if its workers listen, wait for the backend for `STATUS_SECONDS` at most.
    """
    with service.database.read() as session:
        run = session.get_one(RunRow, run_id)
        place = run.place
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
    """The backend has not answered yet."""


def _status_soon(service: Service, project: str, backend: Backend, job: JobHandle) -> JobStatus:
    """The status of a job.

    Raises:
        BackendError: as raised by `Backend.status`, or it has not answered in time.
    """
    future = service.status_threads.submit(project, functools.partial(backend.status, job), job.backend)
    if not wait([future], STATUS_SECONDS).done:
        future.cancel()
        raise _SlowBackendError(
            f"backend {job.backend}: no answer for {STATUS_SECONDS:g} s",
            "check that it can be reached from the service's machine; it is tried again",
        )
    return future.result()


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
            row = service.bulkhead.call_urgent(
                place.registration,
                lambda: attempts.load(service.database, opened, *of),
                service.settings.store_wait_seconds,
            )
        except StoreError:
            pass  # the next call that needs the store raises it
        else:
            return row, False
    return attempts.undescribed(service.database, *of), True


def at_store(service: Service, target: StopTarget, work: Callable[[Store], _Result]) -> _Result:
    """Execute work at a target's store, with a timeout, because a stop can also use the job's backend.

    Raises:
        StoreError, ConfigError: the store cannot be opened, refused, or has not answered in time.
    """
    run_store = target.run_store
    return service.bulkhead.call_urgent(
        target.place.registration, lambda: work(run_store), service.settings.store_wait_seconds
    )


def write_control(service: Service, target: StopTarget, stop: StopRequest) -> ControlDocument:
    """Request that all workers stop: in the database, which answers announcements, and on the store.

    A stop request of the same attempt is not replaced, because its workers must agree on one step.

    Raises:
        StoreError, ConfigError: the store refused. The database has the request and an action that writes it to the store
            later.
    """
    with service.database.write() as session:
        change(session, target.run.id, lambda document: _with(document, stop))
    failpoint("control.in_database", target.run.id)
    try:
        control = at_store(service, target, lambda run_store: mirror(service, target.run.id, run_store))
    except REFUSED:
        with service.database.write() as session:
            request_change(session, target.run.id, lambda document: document)
        raise
    failpoint("control.on_store", target.run.id)
    return control


def _with(document: ControlDocument, stop: StopRequest) -> ControlDocument:
    is_requested = document.stop is not None and document.stop.attempt == stop.attempt
    return document if is_requested else document.with_stop(stop)
