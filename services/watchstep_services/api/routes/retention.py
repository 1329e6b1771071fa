"""Retention policy of a project; deletion and hold of a single run."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep.format.layout import check_name
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import insert_missing
from watchstep_services.db.models import Project, RetentionPolicy, RunRow, Upkeep
from watchstep_services.retention import is_being_stopped
from watchstep_services.runs.lifecycle import ENDED

router = APIRouter(prefix="/v1/projects/{project}", tags=["retention"])

Seconds = Annotated[int, Field(ge=0, le=100 * 366 * 86400)]
_POLICY: dict[str, Any] = {"examples": [{"keep_tensors_s": 604800, "keep_runs_s": 31536000}]}
_FIELDS = ("compact_after_s", "originals_s", "keep_tensors_s", "keep_runs_s")


class Retention(BaseModel):
    """Retention policy. Times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=_POLICY)

    compact_after_s: Seconds | None = Field(
        None, description="Time from a run's end to its compaction; 0: never; null: the service's setting."
    )
    originals_s: Seconds | None = Field(
        None,
        description="Time from a compaction to the deletion of the segments that it replaced; null: the service's setting.",
    )
    keep_tensors_s: Seconds | None = Field(
        None, description="Time from a run's end to the deletion of its full tensors; null: never."
    )
    keep_runs_s: Seconds | None = Field(
        None,
        description="Time from a run's end to its deletion from the store and the database; null: never.",
    )


class RunHold(BaseModel):
    """Reason for a hold on a run."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"examples": [{"reason": "paper"}]}
    )

    reason: str = Field(min_length=1, max_length=1000)


class RetentionStatus(BaseModel):
    """Retention steps that were applied to a run after its end. Times are nanoseconds since the epoch."""

    deleting: bool
    on_hold: bool
    hold_by: str
    hold_reason: str
    compacted_ns: int | None
    originals_gone_ns: int | None
    tensors_gone_ns: int | None
    problem: str


@router.get("/retention", summary="Get the retention policy")
@permits("read")
def get_retention(project: str, service: Served) -> Retention:
    """Return the project's policy. Without a policy, the service's settings control compaction, and no run is deleted."""
    with service.database.read() as session:
        _check_project(session, project)
        row = session.get(RetentionPolicy, project)
        return Retention() if row is None else Retention(**{name: getattr(row, name) for name in _FIELDS})


@router.put("/retention", summary="Set the retention policy")
@permits("administer")
def put_retention(project: str, body: Retention, service: Served, caller: Caller) -> Retention:
    """Replace the project's policy. It also applies to runs that have already ended, from their next check on."""
    with service.database.write() as session:
        _check_project(session, project)
        values = {**body.model_dump(), "changed_by": caller.role, "changed_ns": read_clock(session)}
        if not insert_missing(session, RetentionPolicy, {"project": project, **values}):
            row = session.get_one(RetentionPolicy, project)
            for name, value in values.items():
                setattr(row, name, value)
        ended = session.query(RunRow.id).filter_by(project=project)
        session.query(Upkeep).filter(Upkeep.run_id.in_(ended.scalar_subquery())).update(
            {"next_ns": 0}, synchronize_session=False
        )
    return body


@router.delete("/runs/{run}", summary="Delete a run", status_code=202)
@permits("administer")
def delete_run(project: str, run: str, service: Served) -> RetentionStatus:
    """Schedule a run that has ended for deletion from the store and the database. Its audit log remains."""
    with service.database.write() as session:
        row = find_run(session, project, run)
        if row.state not in (*ENDED, "lost"):
            raise RequestRefusedError(
                409, f"run {project}/{run}: {row.state}", "stop it, or wait until it ends"
            )
        upkeep = _lock_upkeep(session, row)
        if upkeep.on_hold:
            raise RequestRefusedError(
                409, f"run {project}/{run}: on hold ({upkeep.hold_reason})", "release the hold first"
            )
        if is_being_stopped(session, row.id):
            raise RequestRefusedError(
                409, f"run {project}/{run}: a stop is in progress", "delete the run after the stop has ended"
            )
        upkeep.deleting, upkeep.next_ns = True, 0
        return _status(upkeep)


@router.get("/runs/{run}/retention", summary="Get a run's retention status")
@permits("read")
def get_retention_status(project: str, run: str, service: Served) -> RetentionStatus:
    """Return whether a run is compacted, on hold, or scheduled for deletion."""
    with service.database.read() as session:
        row = find_run(session, project, run)
        return _status(session.get(Upkeep, row.id) or _new_upkeep(row))


@router.put("/runs/{run}/hold", summary="Hold a run")
@permits("operate")
def hold_run(project: str, run: str, body: RunHold, service: Served, caller: Caller) -> RetentionStatus:
    """Exempt a run from the project's policy until the hold is released."""
    with service.database.write() as session:
        upkeep = _lock_upkeep(session, find_run(session, project, run))
        if upkeep.deleting:
            raise RequestRefusedError(
                409, f"run {project}/{run}: being deleted", "parts of it may already be deleted"
            )
        upkeep.on_hold, upkeep.hold_by, upkeep.hold_reason = True, caller.role, body.reason
        return _status(upkeep)


@router.delete("/runs/{run}/hold", summary="Release a run")
@permits("operate")
def release_run(project: str, run: str, service: Served) -> RetentionStatus:
    """Release the hold on a run, so that the project's policy applies again."""
    with service.database.write() as session:
        upkeep = _lock_upkeep(session, find_run(session, project, run))
        upkeep.on_hold, upkeep.hold_by, upkeep.hold_reason, upkeep.next_ns = False, "", "", 0
        return _status(upkeep)


def _check_project(session: Session, project: str) -> None:
    check_name("project", project)
    if session.get(Project, project) is None:
        raise NotFoundError(f"project {project}: not found", "create it first, or check the name")


def _new_upkeep(run: RunRow) -> Upkeep:
    return Upkeep(
        run_id=run.id, ended_ns=run.ended_ns or 0, next_ns=0, lease_until_ns=0, claims=0, deleting=False, on_hold=False,
        hold_by="", hold_reason="", tries=0, problem="",
    )  # fmt: skip


def _lock_upkeep(session: Session, run: RunRow) -> Upkeep:
    row = session.get(Upkeep, run.id, with_for_update=True)
    if row is None:
        row = _new_upkeep(run)
        session.add(row)
    return row


def _status(row: Upkeep) -> RetentionStatus:
    return RetentionStatus(**{name: getattr(row, name) for name in RetentionStatus.model_fields})
