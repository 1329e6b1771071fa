"""Attempts of a run: how far each came, how its workers ended, and the job that it was."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy import select

from watchstep.errors import NotFoundError
from watchstep.format.layout import check_name
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Served, permits
from watchstep_services.api.schemas.models import JobOutput
from watchstep_services.api.schemas.paging import ListOrder, Paged, PageOutput
from watchstep_services.db.models import Attempt, BoundJobRow

attempts_router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/attempts", tags=["runs"])


class AttemptOutput(BaseModel):
    """An attempt."""

    attempt: str
    world_size: int = Field(description="How many ranks it has; 0 before it is known.")
    on_stop: str = Field(description="What its workers do when they are asked to stop.")
    started_ns: int = Field(description="When it began, by its own clock; 0 before that is known.")
    first_heard_ns: int = Field(description="When the service first read something of it; 0 before.")
    sealed: int = Field(description="The last step that all live workers have passed; -1 before the first.")
    largest: int = Field(description="The largest step that was read; -1 before the first.")
    ends: dict[str, Any] = Field(description="Rank: how it ended.")
    job: JobOutput | None


class AttemptList(PageOutput):
    """Attempts, oldest first."""

    attempts: list[AttemptOutput]


@attempts_router.get("", summary="List attempts")
@permits("read")
def list_attempts(project: str, run: str, service: Served, paging: Paged) -> AttemptList:
    """Attempts of a run in the order in which they were heard of."""
    with service.database.read() as session:
        row = find_run(session, project, run)
        rows, token = paging.fetch(session, Attempt, [Attempt.run_id == row.id], ListOrder(Attempt.id))
        chosen = select(BoundJobRow).where(
            BoundJobRow.run_id == row.id, BoundJobRow.attempt.in_([held.attempt for held in rows])
        )
        jobs = {job.attempt: job for job in session.execute(chosen).scalars()}
    attempts = [_attempt(held, jobs.get(held.attempt)) for held in rows]
    return AttemptList(attempts=attempts, next_page_token=token)


@attempts_router.get("/{attempt}", summary="Look at an attempt")
@permits("read")
def get_attempt(project: str, run: str, attempt: str, service: Served) -> AttemptOutput:
    """How far it came, how its workers ended, and its job."""
    check_name("attempt", attempt)
    with service.database.read() as session:
        row = find_run(session, project, run)
        named = {"run_id": row.id, "attempt": attempt}
        held = session.execute(select(Attempt).filter_by(**named)).scalar_one_or_none()
        job = session.execute(select(BoundJobRow).filter_by(**named)).scalar_one_or_none()
    if held is None:
        raise NotFoundError(f"attempt {attempt!r}: not one of run {project}/{run}", "list the run's attempts")
    return _attempt(held, job)


def _attempt(row: Attempt, job: BoundJobRow | None) -> AttemptOutput:
    held = {name: getattr(row, name) for name in AttemptOutput.model_fields if name != "job"}
    return AttemptOutput(**held, job=None if job is None else job_output(job))


def job_output(job: BoundJobRow) -> JobOutput:
    """A job, as it is shown."""
    return JobOutput(
        backend=job.backend,
        id=job.job_id,
        identity=job.identity,
        bound_by=job.bound_by,
        state=job.state,
        exit_code=job.exit_code,
    )
