"""How long what is kept of a project's runs; and one run's deletion, or its being held."""

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
from watchstep_services.retention.upkeep import is_being_stopped
from watchstep_services.runs.lifecycle import ENDED

router = APIRouter(prefix="/v1/projects/{project}", tags=["retention"])

Seconds = Annotated[int, Field(ge=0, le=100 * 366 * 86400)]
_POLICY: dict[str, Any] = {"examples": [{"keep_tensors_s": 604800, "keep_runs_s": 31536000}]}
_FIELDS = ("compact_after_s", "originals_s", "keep_tensors_s", "keep_runs_s")


class Retention(BaseModel):
    """How long what is kept, in seconds after a run's end."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=_POLICY)

    compact_after_s: Seconds | None = Field(
        None, description="Compacted after so long; 0: never; null: as the service's."
    )
    originals_s: Seconds | None = Field(
        None,
        description="Segments stay so long after the compaction that replaced them; null: as the service's.",
    )
    keep_tensors_s: Seconds | None = Field(
        None, description="Full tensors are deleted after so long; null: never."
    )
    keep_runs_s: Seconds | None = Field(
        None, description="Runs are deleted whole after so long, from the store and here; null: never."
    )


class RunHold(BaseModel):
    """Why a run is held."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"examples": [{"reason": "paper"}]}
    )

    reason: str = Field(min_length=1, max_length=1000)


class Keeping(BaseModel):
    """What was done to a run after its end. Times are nanoseconds since the epoch."""

    deleting: bool
    on_hold: bool
    hold_by: str
    hold_reason: str
    compacted_ns: int | None
    originals_gone_ns: int | None
    tensors_gone_ns: int | None
    problem: str


@router.get("/retention", summary="Look at how long what is kept")
@permits("read")
def get_retention(project: str, service: Served) -> Retention:
    """The project's policy. Without one, runs are compacted as the service's settings say, and nothing is deleted."""
    with service.database.read() as session:
        _known(session, project)
        row = session.get(RetentionPolicy, project)
        return Retention() if row is None else Retention(**{name: getattr(row, name) for name in _FIELDS})


@router.put("/retention", summary="Set how long what is kept")
@permits("administer")
def put_retention(project: str, body: Retention, service: Served, caller: Caller) -> Retention:
    """Replace the project's policy. It holds for runs that have ended already as well, from the next look at them on."""
    with service.database.write() as session:
        _known(session, project)
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
def delete_run(project: str, run: str, service: Served) -> Keeping:
    """Delete a run that has ended, from the store and here, soon. What the audit log says of it stays."""
    with service.database.write() as session:
        row = find_run(session, project, run)
        if row.state not in (*ENDED, "lost"):
            raise RequestRefusedError(
                409, f"run {project}/{run}: is {row.state}", "stop it, or wait until it has ended"
            )
        kept = _upkeep(session, row)
        if kept.on_hold:
            raise RequestRefusedError(
                409, f"run {project}/{run}: is held ({kept.hold_reason})", "let it go first"
            )
        if is_being_stopped(session, row.id):
            raise RequestRefusedError(
                409, f"run {project}/{run}: a stop is on its way", "delete it once the stop has ended"
            )
        kept.deleting, kept.next_ns = True, 0
        return _keeping(kept)


@router.get("/runs/{run}/keeping", summary="Look at what was done to a run after its end")
@permits("read")
def get_keeping(project: str, run: str, service: Served) -> Keeping:
    """Whether a run is compacted, held, or about to be deleted."""
    with service.database.read() as session:
        row = find_run(session, project, run)
        return _keeping(session.get(Upkeep, row.id) or _fresh(row))


@router.put("/runs/{run}/hold", summary="Hold a run")
@permits("operate")
def hold_run(project: str, run: str, body: RunHold, service: Served, caller: Caller) -> Keeping:
    """Keep a run, whatever the project's policy says, until it is let go."""
    with service.database.write() as session:
        kept = _upkeep(session, find_run(session, project, run))
        if kept.deleting:
            raise RequestRefusedError(
                409, f"run {project}/{run}: is being deleted", "some of it may be gone already"
            )
        kept.on_hold, kept.hold_by, kept.hold_reason = True, caller.role, body.reason
        return _keeping(kept)


@router.delete("/runs/{run}/hold", summary="Let a run go")
@permits("operate")
def release(project: str, run: str, service: Served) -> Keeping:
    """Let the project's policy decide again."""
    with service.database.write() as session:
        kept = _upkeep(session, find_run(session, project, run))
        kept.on_hold, kept.hold_by, kept.hold_reason, kept.next_ns = False, "", "", 0
        return _keeping(kept)


def _known(session: Session, project: str) -> None:
    check_name("project", project)
    if session.get(Project, project) is None:
        raise NotFoundError(f"project {project}: not known", "register it first, or check the name")


def _fresh(run: RunRow) -> Upkeep:
    return Upkeep(
        run_id=run.id, ended_ns=run.ended_ns or 0, next_ns=0, lease_until_ns=0, claims=0, deleting=False, on_hold=False,
        hold_by="", hold_reason="", tries=0, problem="",
    )  # fmt: skip


def _upkeep(session: Session, run: RunRow) -> Upkeep:
    row = session.get(Upkeep, run.id, with_for_update=True)
    if row is None:
        row = _fresh(run)
        session.add(row)
    return row


def _keeping(row: Upkeep) -> Keeping:
    return Keeping(**{name: getattr(row, name) for name in Keeping.model_fields})
