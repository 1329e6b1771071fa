"""Events of a run, as CloudEvents."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import select

from watchstep_services.api.access import Served, permits
from watchstep_services.api.lookup import find_run
from watchstep_services.api.models import EventList
from watchstep_services.database.models import Event
from watchstep_services.events import CloudEvent

router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/events", tags=["events"])


@router.get("", summary="List events")
@permits("read")
def list_events(
    project: str,
    run: str,
    service: Served,
    after: Annotated[int, Query(ge=0, description="Only events after this place.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> EventList:
    """Events of a run in the order in which they came."""
    with service.database.read() as session:
        row = find_run(session, project, run)
        rows = list(
            session.execute(
                select(Event)
                .where(Event.run_id == row.id, Event.number > after)
                .order_by(Event.number)
                .limit(limit)
            ).scalars()
        )
    return EventList(
        events=[CloudEvent.model_validate(held.event) for held in rows],
        after=rows[-1].number if rows else after,
    )
