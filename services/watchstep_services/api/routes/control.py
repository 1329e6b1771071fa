"""What is asked of a run's workers: full tensors, a cadence, and whether a stopped run may start again."""

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
from watchstep_services.runs.control import Allowing, allow_restart, ask_for_snapshot, set_cadence
from watchstep_services.service.context import Service

router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/control", tags=["control"])

_Collection = Annotated[str, Field(min_length=1, max_length=128)]
_Every = Annotated[int, Field(ge=1, le=10**9)]


class _Input(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SnapshotInput(_Input):
    """Full tensors to take."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"step": 1200}]})

    step: int | None = Field(
        None,
        ge=0,
        lt=2**62,
        description="Of this step, or of the next if it has passed; the next if left out.",
    )
    attempt: str = Field("", max_length=128, description="Which attempt; the newest where empty.")


class SnapshotAsked(BaseModel):
    """A request for full tensors: it is in the control document, and the workers answer it at their next steps."""

    id: str = Field(description="The snapshot on the store names it.")
    attempt: str
    step: int
    control: ControlData


class CadenceInput(_Input):
    """How often collections are measured."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"every": {"activations": 50}}]})

    every: dict[_Collection, _Every] = Field(
        max_length=100,
        description="Collection: every so many steps, instead of the worker's own choice. What is left out is chosen by "
        "the worker again; empty for all.",
    )


class RestartInput(_Input):
    """Why a stopped run may start again."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"reason": "learning rate lowered to 1e-4"}]})

    reason: str = Field(min_length=1, max_length=1000)
    attempt: str = Field(
        "", max_length=128, description="The only attempt that may start; all where it is left out."
    )


@router.get("", summary="Look at the control document")
@permits("read")
def get_control(project: str, run: str, service: Served, response: Response) -> ControlData:
    """What is asked of the run's workers, as the answer to each announcement carries it."""
    with service.database.read() as session:
        control = find_run(session, project, run).control
    response.headers["etag"] = f'"{control["version"]}"'
    return ControlData.model_validate(control)


@router.post(
    "/snapshots",
    summary="Ask for full tensors",
    status_code=202,
    dependencies=[Once],
    responses=documented(409),
)
@permits("operate")
def ask_snapshot(project: str, run: str, body: SnapshotInput, service: Served) -> SnapshotAsked:
    """Have each worker of an attempt take the weights and gradients of a step."""
    with service.database.write() as session:
        row = find_run(session, project, run)
        if not (body.attempt or row.attempt):
            raise ConfigError(f"run {project}/{run}: has no attempt yet", "ask when it has begun")
        attempt = check_name("attempt", body.attempt or row.attempt)
        step = row.last_step + 1 if body.step is None else body.step
        request = SnapshotRequest(f"asked-{uuid.uuid4()}", step, attempt)
        action = ask_for_snapshot(session, row.id, request)
        control = _control(session, row)
    _tell(service, action)
    return SnapshotAsked(id=request.id, attempt=attempt, step=step, control=control)


@router.put("/cadence", summary="Set how often is measured")
@permits("operate")
def put_cadence(project: str, run: str, body: CadenceInput, service: Served) -> ControlData:
    """Have collections measured at a fixed cadence, in place of what the workers chose within their budget."""
    with service.database.write() as session:
        row = find_run(session, project, run)
        action = set_cadence(session, row.id, body.every)
        control = _control(session, row)
    _tell(service, action)
    return control


@router.post(
    "/restart", summary="Let a stopped run start again", dependencies=[Once], responses=documented(409)
)
@permits("operate")
def let_restart(project: str, run: str, body: RestartInput, service: Served, caller: Caller) -> ControlData:
    """Take the tombstone away, or let one new attempt pass it. The attempt that was stopped stays stopped. Safe to repeat."""
    attempt = check_name("attempt", body.attempt) if body.attempt else ""
    with service.database.write() as session:
        row = find_run(session, project, run)
        action = allow_restart(session, service.base_url, row.id, Allowing(caller.role, body.reason, attempt))
        control = _control(session, row)
    _tell(service, action)
    return control


def _control(session: Session, row: RunRow) -> ControlData:
    held: dict[str, Any] = session.get_one(RunRow, row.id).control
    return ControlData.model_validate(held)


def _tell(service: Service, action: int | None) -> None:
    if action is not None:
        service.notifier.action_due(action)
