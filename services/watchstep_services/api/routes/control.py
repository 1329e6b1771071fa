"""Control document of a run: snapshot requests, cadences, and permission to restart a stopped run."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError
from watchstep.format.control import SnapshotRequest
from watchstep.format.layout import check_name
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.idempotency import Once
from watchstep_services.api.schemas.models import ControlData
from watchstep_services.api.schemas.problems import documented
from watchstep_services.db.models import RunRow
from watchstep_services.runs import control as run_control
from watchstep_services.runs.lifecycle import ENDED
from watchstep_services.service.context import Service
from watchstep_services.tenancy import ConflictError

router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/control", tags=["control"])

_Collection = Annotated[str, Field(min_length=1, max_length=128)]
_Every = Annotated[int, Field(ge=1, le=10**9)]


class _Input(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SnapshotInput(_Input):
    """A request for a snapshot."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"step": 1200}]})

    step: int | None = Field(
        None,
        ge=0,
        lt=2**62,
        description="Step of the snapshot, or the next step if it has passed; default: the next step.",
    )
    attempt: str = Field("", max_length=128, description="Attempt of the run; empty: the newest.")


class SnapshotRequested(BaseModel):
    """A snapshot request in the control document. The workers handle it at their next steps."""

    id: str = Field(description="Request id, which the snapshot on the store contains.")
    attempt: str
    step: int
    control: ControlData


class CadenceInput(_Input):
    """Cadences of collections."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"every": {"activations": 50}}]})

    every: dict[_Collection, _Every] = Field(
        max_length=100,
        description="Collection to the number of steps between its measurements, instead of the worker's own cadence. "
        "The worker chooses the cadence of a collection that is omitted; empty: of all collections.",
    )


class RestartInput(_Input):
    """Permission to restart a stopped run."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"reason": "learning rate lowered to 1e-4"}]})

    reason: str = Field(min_length=1, max_length=1000)
    attempt: str = Field(
        "", max_length=128, description="The only attempt that may start; default: any new attempt."
    )


@router.get("", summary="Get the control document")
@permits("read")
def get_control(project: str, run: str, service: Served, response: Response) -> ControlData:
    """Return what the run's workers are requested to do. The response to each announcement contains the same document."""
    with service.database.read() as session:
        control = find_run(session, project, run).control
    response.headers["etag"] = f'"{control["version"]}"'
    return ControlData.model_validate(control)


@router.post(
    "/snapshots",
    summary="Request a snapshot",
    status_code=202,
    dependencies=[Once],
    responses=documented(409),
)
@permits("operate")
def request_snapshot(project: str, run: str, body: SnapshotInput, service: Served) -> SnapshotRequested:
    """Request that each worker of an attempt records all weights and gradients of a step. The attempt has not ended."""
    with service.database.write() as session:
        row = find_run(session, project, run)
        if not (body.attempt or row.attempt):
            raise ConfigError(
                f"run {project}/{run}: has no attempt yet", "request the snapshot after the run has started"
            )
        attempt = check_name("attempt", body.attempt or row.attempt)
        if attempt == row.attempt and row.state in ENDED:
            raise ConflictError(
                f"run {project}/{run}: attempt {attempt} has ended ({row.state}), so that no worker can record a snapshot",
                "request it while the run is running",
            )
        step = row.last_step + 1 if body.step is None else body.step
        request = SnapshotRequest(f"requested-{uuid.uuid4()}", step, attempt)
        action = run_control.request_snapshot(session, row.id, request)
        control = _control(session, row)
    _notify(service, action)
    return SnapshotRequested(id=request.id, attempt=attempt, step=step, control=control)


@router.put("/cadence", summary="Set cadences")
@permits("operate")
def put_cadence(project: str, run: str, body: CadenceInput, service: Served) -> ControlData:
    """Set fixed cadences of collections, instead of those that the workers choose within their budget."""
    with service.database.write() as session:
        row = find_run(session, project, run)
        action = run_control.set_cadence(session, row.id, body.every)
        control = _control(session, row)
    _notify(service, action)
    return control


@router.post(
    "/restart", summary="Allow a stopped run to restart", dependencies=[Once], responses=documented(409)
)
@permits("operate")
def allow_restart(project: str, run: str, body: RestartInput, service: Served, caller: Caller) -> ControlData:
    """Remove the tombstone, or allow one new attempt despite it. The stopped attempt remains stopped. Idempotent."""
    attempt = check_name("attempt", body.attempt) if body.attempt else ""
    with service.database.write() as session:
        row = find_run(session, project, run)
        permission = run_control.RestartPermission(caller.role, body.reason, attempt)
        action = run_control.allow_restart(session, service.base_url, row.id, permission)
        control = _control(session, row)
    _notify(service, action)
    return control


def _control(session: Session, row: RunRow) -> ControlData:
    control: dict[str, Any] = session.get_one(RunRow, row.id).control
    return ControlData.model_validate(control)


def _notify(service: Service, action: int | None) -> None:
    if action is not None:
        service.notifier.action_due(action)
