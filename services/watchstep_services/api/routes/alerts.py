"""Alerts of a run, and of all runs of a project."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter
from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from watchstep.format.layout import check_name
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Served, permits
from watchstep_services.api.schemas.filters import (
    Labels,
    Phases,
    Rules,
    Severities,
    Since,
    Until,
    between,
    labelled,
    one_of,
)
from watchstep_services.api.schemas.models import AlertList, AlertOutput
from watchstep_services.api.schemas.paging import ListOrder, Paged, Paging
from watchstep_services.db.models import AlertRow, Incident, RunRow

router = APIRouter(prefix="/v1/projects/{project}", tags=["alerts"])


@router.get("/runs/{run}/alerts", summary="List alerts of a run")
@permits("read")
def list_run_alerts(
    project: str,
    run: str,
    service: Served,
    paging: Paged,
    phases: Phases = None,
    severities: Severities = None,
    rules: Rules = None,
    labels: Labels = None,
    since: Since = None,
    until: Until = None,
) -> AlertList:
    """Alerts of a run, those that began last first; the times are those of the last change."""
    chosen = [
        *one_of(AlertRow.phase, phases),
        *one_of(AlertRow.severity, severities),
        *one_of(AlertRow.rule, rules),
        *labelled(AlertRow.details, labels),
        *between(AlertRow.since_ns, since, until),
    ]
    with service.database.read() as session:
        return _list(session, paging, [AlertRow.run_id == find_run(session, project, run).id, *chosen])


@router.get("/alerts", summary="List alerts of a project")
@permits("read")
def list_alerts(
    project: str,
    service: Served,
    paging: Paged,
    phases: Phases = None,
    severities: Severities = None,
    rules: Rules = None,
    labels: Labels = None,
    since: Since = None,
    until: Until = None,
) -> AlertList:
    """Alerts of all runs of a project, those that began last first; the times are those of the last change."""
    check_name("project", project)
    chosen = [
        *one_of(AlertRow.phase, phases),
        *one_of(AlertRow.severity, severities),
        *one_of(AlertRow.rule, rules),
        *labelled(AlertRow.details, labels),
        *between(AlertRow.since_ns, since, until),
    ]
    of_project = AlertRow.run_id.in_(select(RunRow.id).where(RunRow.project == project))
    with service.database.read() as session:
        return _list(session, paging, [of_project, *chosen])


def _list(session: Session, paging: Paging, conditions: Iterable[ColumnElement[bool]]) -> AlertList:
    rows, token = paging.fetch(session, AlertRow, conditions, ListOrder(AlertRow.id, descending=True))
    named = select(RunRow.id, RunRow.run).where(RunRow.id.in_({row.run_id for row in rows}))
    names = {held.id: held.run for held in session.execute(named)}
    keys = {row.incident for row in rows if row.incident}
    incidents = session.execute(select(Incident).where(Incident.key.in_(keys))).scalars() if keys else ()
    summaries = {(one.run_id, one.key): one.summary for one in incidents}
    alerts = [_alert(row, names[row.run_id], summaries.get((row.run_id, row.incident))) for row in rows]
    return AlertList(alerts=alerts, next_page_token=token)


def _alert(row: AlertRow, run: str, incident: dict[str, Any] | None) -> AlertOutput:
    apart = {"run": run, "incident": incident}
    held = {name: getattr(row, name) for name in AlertOutput.model_fields if name not in apart}
    return AlertOutput.model_validate({**held, **apart})
