"""What a stop is aimed at: the run, its attempt, its job, and whether they are over."""

from __future__ import annotations

from dataclasses import dataclass

from watchstep.control import ControlDocument, StopRequest
from watchstep.store import Store
from watchstep_services.control import change, mirror
from watchstep_services.database.models import Attempt, Project, Run
from watchstep_services.estimator.backend import Backend, JobHandle, JobStatus
from watchstep_services.estimator.errors import BackendError
from watchstep_services.evaluator import attempts
from watchstep_services.points import reach
from watchstep_services.service import Service
from watchstep_services.stores.place import StorePlace
from watchstep_services.tenancy.jobs import bound_job


@dataclass(frozen=True)
class Target:
    """An attempt to stop.

    Attributes:
        run: its run.
        attempt: its row.
        place: of its project.
        run_store: where the run lies.
        job: the bound job, if any.
        status: how the job is; None without one.
        backend: what the job runs on; None where this process knows no such backend.
        trouble: why the backend could not be asked now; the status is unknown.
    """

    run: Run
    attempt: Attempt
    place: StorePlace
    run_store: Store
    job: JobHandle | None
    status: JobStatus | None
    backend: Backend | None
    trouble: BackendError | None = None

    @property
    def ends_complete(self) -> bool:
        """Whether every worker has said how it ended."""
        return len(self.attempt.ends) >= max(1, self.attempt.world_size)

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


def load_target(service: Service, run_id: int, attempt: str) -> Target:
    """Find what a stop is aimed at, and how its job is now, if its backend can say so.

    Raises:
        StoreError, ConfigError: the store cannot be opened or does not answer.
    """
    with service.database.read() as session:
        run = session.get_one(Run, run_id)
        place = session.get_one(Project, run.project).place
        found = bound_job(session, run_id, attempt)
    run_store = service.stores.of_run(place, run.run)
    row = attempts.load(service.database, run_store, run_id, attempt)
    if found is None:
        return Target(run, row, place, run_store, None, None, None)
    backend = service.backend_of(found.kind, found.settings)
    trouble = None
    if backend is None:
        status = JobStatus("unknown", detail=f"this service has no backend of kind {found.kind!r}")
    else:
        try:
            status = backend.status(found.job)
        except BackendError as error:
            status, trouble = JobStatus("unknown", detail=error.what), error
    return Target(run, row, place, run_store, found.job, status, backend, trouble)


def write_control(service: Service, target: Target, stop: StopRequest) -> ControlDocument:
    """Ask all workers to stop: in the database, which answers announcements, and on the store.

    An attempt that has been asked is not asked for another step: its workers must agree on one.

    Raises:
        StoreError: the store refused; the database has the stop already.
    """
    with service.database.write() as session:
        change(session, target.run.id, lambda document: _with(document, stop))
    reach("control.in_database", target.run.id)
    control = mirror(service, target.run.id, target.run_store)
    reach("control.on_store", target.run.id)
    return control


def _with(document: ControlDocument, stop: StopRequest) -> ControlDocument:
    asked = document.stop is not None and document.stop.attempt == stop.attempt
    return document if asked else document.with_stop(stop)
