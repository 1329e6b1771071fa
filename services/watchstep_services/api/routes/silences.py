"""Silences: notifications of matching alerts are suppressed for a time, with an author and a reason."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError
from watchstep_services.api.lookup import find_project
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.idempotency import Once
from watchstep_services.api.schemas.filters import time_ns
from watchstep_services.api.schemas.paging import ListOrder, Paged, PageOutput
from watchstep_services.api.schemas.problems import documented
from watchstep_services.channels.routing import MOST_CHARACTERS
from watchstep_services.core.settings import nanoseconds
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import RunRow, Silence
from watchstep_services.notify import silences
from watchstep_services.notify.silences import labels_of

router = APIRouter(prefix="/v1/projects/{project}/silences", tags=["silences"])

State = Literal["active", "pending", "expired"]
Number = Annotated[int, Path(ge=1, lt=2**63, description="The silence's id.")]
Matchers = Annotated[
    list[Annotated[str, Field(max_length=MOST_CHARACTERS)]],
    Field(
        min_length=1,
        max_length=silences.MOST_MATCHERS,
        description="Matchers, which must all match: LABEL=VALUE, with =, !=, =~ or !~ (RE2, over the whole value). Every alert "
        "has the labels project, run, name, rule and severity, and those of its rule config.",
        examples=[['run=~"night-.*"', "severity!=critical"]],
    ),
]
_PREVIEWED = 200


class SilenceInput(BaseModel):
    """A silence to create."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "matchers": ["run=night-1"],
                    "reason": "known: learning rate sweep",
                    "duration_seconds": 7200,
                }
            ]
        },
    )

    matchers: Matchers
    reason: str = Field(
        min_length=1, max_length=1000, description="Reason, shown with each suppressed notification."
    )
    starts: str | None = Field(
        None, max_length=40, description="Start: RFC 3339, or nanoseconds since the epoch; default: now."
    )
    ends: str | None = Field(
        None, max_length=40, description="End, in the same formats; or set duration_seconds."
    )
    duration_seconds: float | None = Field(None, gt=0, le=366 * 86400)
    suppresses_stop: bool = Field(
        False, description="Also suppress stops. Otherwise a silenced alert still stops its job."
    )


class SilencePreviewInput(BaseModel):
    """Matchers to preview."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    matchers: Matchers


class SilenceOutput(BaseModel):
    """A silence."""

    id: int
    state: str = Field(description="active, pending or expired.")
    matchers: list[str]
    author: str
    reason: str
    suppresses_stop: bool
    created_ns: int
    starts_ns: int
    ends_ns: int
    expired_by: str = Field(description="User who ended the silence early; empty: nobody.")


class SilenceList(PageOutput):
    """Silences, newest first."""

    silences: list[SilenceOutput]


class SilencedAlert(BaseModel):
    """A firing alert that the silence would cover."""

    run: str
    fingerprint: str
    labels: dict[str, str]
    fired_ns: int
    message: str


class SilencePreviewOutput(BaseModel):
    """Firing alerts that the matchers match, most recent first; at most 200."""

    alerts: list[SilencedAlert]


@router.post("", summary="Create a silence", status_code=201, dependencies=[Once], responses=documented(409))
@permits("operate")
def create_silence(project: str, body: SilenceInput, service: Served, caller: Caller) -> SilenceOutput:
    """Suppress notifications of matching alerts between two times. Rules still stop jobs, unless `suppresses_stop` is set."""
    matchers = silences.read_matchers(body.matchers)
    with service.database.write() as session:
        find_project(session, project)
        now = read_clock(session)
        starts = now if body.starts is None else time_ns("starts", body.starts)
        request = silences.SilenceRequest(
            matchers, caller.who, body.reason, starts, _end(body, max(starts, now)), body.suppresses_stop
        )
        return _output(silences.create(session, project, request, now), now)


@router.get("", summary="List silences")
@permits("read")
def list_silences(
    project: str,
    service: Served,
    paging: Paged,
    state: Annotated[State | None, Query(description="Only silences in this state.")] = None,
) -> SilenceList:
    """Return the silences of a project, newest first. Expired silences remain in the list."""
    with service.database.read() as session:
        find_project(session, project)
        now = read_clock(session)
        conditions: list[ColumnElement[bool]] = [Silence.project == project]
        if state == "expired":
            conditions.append(Silence.ends_ns <= now)
        elif state is not None:
            started = Silence.starts_ns <= now if state == "active" else Silence.starts_ns > now
            conditions += [Silence.ends_ns > now, started]
        rows, token = paging.fetch(session, Silence, conditions, ListOrder(Silence.id, descending=True))
        return SilenceList(silences=[_output(row, now) for row in rows], next_page_token=token)


@router.post("/preview", summary="Preview a silence")
@permits("read")
def preview_silence(project: str, body: SilencePreviewInput, service: Served) -> SilencePreviewOutput:
    """Return the firing alerts that a silence with these matchers would cover."""
    matchers = silences.read_matchers(body.matchers)
    with service.database.read() as session:
        find_project(session, project)
        matching = []
        for row in silences.matching(session, project, matchers, _PREVIEWED):
            run = session.get_one(RunRow, row.run_id)
            matching.append(
                SilencedAlert(
                    run=run.run,
                    fingerprint=row.fingerprint,
                    labels=labels_of(row, project, run.run),
                    fired_ns=row.fired_ns,
                    message=row.message,
                )
            )
        return SilencePreviewOutput(alerts=matching)


@router.get("/{number}", summary="Get a silence")
@permits("read")
def get_silence(project: str, number: Number, service: Served) -> SilenceOutput:
    """Return a silence."""
    with service.database.read() as session:
        return _output(_find(session, project, number), read_clock(session))


@router.delete("/{number}", summary="End a silence")
@permits("operate")
def expire_silence(project: str, number: Number, service: Served, caller: Caller) -> SilenceOutput:
    """End a silence now. Suppressed alerts that still fire are then notified. An expired silence remains unchanged."""
    with service.database.write() as session:
        row = _find(session, project, number)
        silences.expire(session, row, caller.who)
        return _output(row, read_clock(session))


def _find(session: Session, project: str, number: int) -> Silence:
    find_project(session, project)
    row = session.get(Silence, number)
    if row is None or row.project != project:
        raise NotFoundError(
            f"silence {number} of project {project}: not found",
            "list the silences of the project to get their ids",
        )
    return row


def _end(body: SilenceInput, starts_ns: int) -> int:
    if (body.ends is None) == (body.duration_seconds is None):
        raise ConfigError("ends, duration_seconds: both or neither set", "set exactly one of them")
    if body.ends is not None:
        return time_ns("ends", body.ends)
    return starts_ns + nanoseconds(body.duration_seconds or 0.0)


def _output(row: Silence, now_ns: int) -> SilenceOutput:
    state: State = "expired" if row.ends_ns <= now_ns else "active" if row.starts_ns <= now_ns else "pending"
    columns: dict[str, Any] = {
        name: getattr(row, name) for name in SilenceOutput.model_fields if name not in ("state", "matchers")
    }
    return SilenceOutput(
        state=state, matchers=[str(matcher) for matcher in silences.matchers_of(row)], **columns
    )
