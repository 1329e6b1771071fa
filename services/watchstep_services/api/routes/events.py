"""Events of a run or of a project as CloudEvents: lists and server-sent event streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from watchstep.format.layout import check_name
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.schemas.filters import Since, Until, Word, between, one_of
from watchstep_services.api.schemas.models import EventList
from watchstep_services.api.schemas.paging import ListOrder, Paged, Paging
from watchstep_services.api.streaming import EventFilter, EventStream, Streaming, Subscription
from watchstep_services.auth import identify
from watchstep_services.core.events import CloudEvent
from watchstep_services.core.redaction import without_addresses
from watchstep_services.db.models import EventRow, RunRow
from watchstep_services.service.context import Service

router = APIRouter(prefix="/v1/projects/{project}", tags=["events"])

_MAX_POSITION = 2**62
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Event stream: `id` is the position to resume from, `event` the type, `data` a CloudEvent.",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": "id: 7\nevent: io.watchstep.alert.firing\ndata: {…}\n\n",
            }
        },
    }
}

After = Annotated[int, Query(ge=0, lt=_MAX_POSITION, description="Only events after this position.")]
Types = Annotated[
    list[Annotated[Word, Query(max_length=64)]] | None,
    Query(
        alias="type",
        max_length=20,
        description="Only events of these types.",
        examples=[["io.watchstep.alert.firing"]],
    ),
]
LastEventId = Annotated[
    int | None,
    Header(
        alias="Last-Event-ID",
        ge=0,
        lt=_MAX_POSITION,
        description="Id of the last received event; default: the current position.",
    ),
]


@router.get("/runs/{run}/events", summary="List events of a run")
@permits("read")
def list_run_events(
    project: str,
    run: str,
    service: Served,
    paging: Paged,
    after: After = 0,
    types: Types = None,
    since: Since = None,
    until: Until = None,
) -> EventList:
    """Return the events of a run, oldest first."""
    with service.database.read() as session:
        of_run = EventRow.run_id == find_run(session, project, run).id
        return _list(session, paging, after, [of_run, *_chosen(types, since, until)])


@router.get("/events", summary="List events of a project")
@permits("read")
def list_events(
    project: str,
    service: Served,
    paging: Paged,
    after: After = 0,
    types: Types = None,
    since: Since = None,
    until: Until = None,
) -> EventList:
    """Return the events of all runs of a project, oldest first."""
    check_name("project", project)
    of_project = EventRow.run_id.in_(select(RunRow.id).where(RunRow.project == project))
    with service.database.read() as session:
        return _list(session, paging, after, [of_project, *_chosen(types, since, until)])


@router.get(
    "/runs/{run}/events/stream",
    summary="Follow the events of a run",
    responses=_STREAM,
    response_class=Response,
)
@permits("read")
async def follow_run_events(
    project: str,
    run: str,
    request: Request,
    service: Served,
    caller: Caller,
    streams: Streaming,
    types: Types = None,
    last_event_id: LastEventId = None,
) -> Response:
    """Stream the events of one run, like the stream of a project."""
    run_id = await run_in_threadpool(_run_id, service, project, run)
    return _stream(
        request, streams, (project, caller.token), EventFilter(run_id, frozenset(types or ())), last_event_id
    )


@router.get(
    "/events/stream", summary="Follow the events of a project", responses=_STREAM, response_class=Response
)
@permits("read")
async def follow_events(
    project: str,
    request: Request,
    caller: Caller,
    streams: Streaming,
    types: Types = None,
    last_event_id: LastEventId = None,
) -> Response:
    """Stream the events of all runs of a project, from now on or after the event of Last-Event-ID.

    A client that resumes with the last id misses no event and receives none twice. Without events, a comment is sent every
    15 seconds. A client that reads nothing for 20 seconds is disconnected.
    """
    check_name("project", project)
    return _stream(
        request, streams, (project, caller.token), EventFilter(None, frozenset(types or ())), last_event_id
    )


def _stream(
    request: Request, streams: Streaming, who: tuple[str, str], event_filter: EventFilter, after: int | None
) -> EventStream:
    secret = request.headers.get("authorization", "").partition(" ")[2].strip()
    database = request.app.state.service.database

    async def allowed() -> bool:
        return await run_in_threadpool(identify, database, secret) is not None

    streams.enter(*who)
    return EventStream(streams, Subscription(*who, event_filter, after, allowed))


def _run_id(service: Service, project: str, run: str) -> int:
    with service.database.read() as session:
        return find_run(session, project, run).id


def _chosen(types: Sequence[str] | None, since: str | None, until: str | None) -> list[ColumnElement[bool]]:
    return [*one_of(EventRow.type, types), *between(EventRow.created_ns, since, until)]


def _list(session: Session, paging: Paging, after: int, conditions: list[ColumnElement[bool]]) -> EventList:
    rows, token = paging.fetch(
        session, EventRow, [EventRow.number > after, *conditions], ListOrder(EventRow.number)
    )
    return EventList(
        events=[CloudEvent.model_validate(without_addresses(row.event)) for row in rows],
        after=rows[-1].number if rows else after,
        next_page_token=token,
    )
