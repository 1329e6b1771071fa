"""Changes of a run's alerts, for its recorder, which mirrors them into the program's run of another tool."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import select

from watchstep.format.layout import check_name
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Served, permits
from watchstep_services.db.models import EventRow

router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/alert-changes", tags=["recording"])

_MAX_CHANGES = 100
_MESSAGE_LENGTH = 1000
_RESOLVED = "no more findings"
_PHASES: dict[str, Literal["firing", "resolved"]] = {
    "io.watchstep.alert.firing": "firing",
    "io.watchstep.alert.resolved": "resolved",
}


class MirroredAlertOutput(BaseModel):
    """A change of an alert."""

    name: str = Field(description="Name of the rule config.")
    severity: str
    phase: Literal["firing", "resolved"]
    step: int = Field(description="Step of the change; of a firing alert, the step of its finding.")
    message: str
    url: str = Field(description="URL of the alert's web page; empty if the service has no public URL.")


class AlertChangeList(BaseModel):
    """Changes of alerts, oldest first, and the position after them."""

    alerts: list[MirroredAlertOutput]
    after: int = Field(description="Position after these changes, to pass as 'after'.")


@router.get("", summary="List changes of a run's alerts")
@permits("record")
def list_alert_changes(
    project: str,
    run: str,
    service: Served,
    attempt: Annotated[str, Query(max_length=200, description="The recorder's attempt.")],
    after: Annotated[int, Query(ge=0, lt=2**63, description="Only changes after this position.")] = 0,
) -> AlertChangeList:
    """Return how the alerts of an attempt began to fire and resolved, without inhibited ones and those of dry runs.

    A recorder may read them: they are about its own data.
    """
    check_name("attempt", attempt)
    with service.database.read() as session:
        rows = (
            session.execute(
                select(EventRow)
                .where(
                    EventRow.run_id == find_run(session, project, run).id,
                    EventRow.type.in_(_PHASES),
                    EventRow.number > after,
                )
                .order_by(EventRow.number)
                .limit(_MAX_CHANGES)
            )
            .scalars()
            .all()
        )
    changes = [_change(row.type, row.event.get("data", {})) for row in rows if _is_shown(row, attempt)]
    return AlertChangeList(alerts=changes, after=rows[-1].number if rows else after)


def _is_shown(row: EventRow, attempt: str) -> bool:
    data = row.event.get("data", {})
    return data.get("attempt") == attempt and not data.get("dry_run") and not data.get("inhibited_by")


def _change(event_type: str, data: dict[str, Any]) -> MirroredAlertOutput:
    phase, finding = _PHASES[event_type], data.get("finding") or {}
    is_firing = phase == "firing"
    return MirroredAlertOutput(
        name=data["rule_config"]["name"],
        severity=data["severity"],
        phase=phase,
        step=finding["step"] if is_firing else data["step"],
        message=str(finding.get("message", ""))[:_MESSAGE_LENGTH] if is_firing else _RESOLVED,
        url=data.get("url", ""),
    )
