"""Alerts of a run, and of all runs of a project.

An alert over all attempts of its run: where it stands, who has taken it up, and who was not told and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from watchstep.format.layout import check_name
from watchstep_services.api.lookup import find_run, find_standing
from watchstep_services.api.middleware.access import Caller, Served, permits
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
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import AlertInstanceRow, AlertRow, Incident, Muted, RunRow, Silence
from watchstep_services.notify.silences import acknowledge, active, covering, labels_of, withdraw

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


notification_state_router = APIRouter(
    prefix="/v1/projects/{project}/runs/{run}/alerts/{fingerprint}", tags=["alerts"]
)

Fingerprint = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="As the list of alerts gives it.")]


class AcknowledgementInput(BaseModel):
    """That somebody has taken an alert up."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"examples": [{"comment": "looking at the data loader"}]},
    )

    comment: str = Field("", max_length=1000)


class Acknowledgement(BaseModel):
    """Who has taken an alert up."""

    who: str
    at_ns: int | None
    comment: str


class MutedOutput(BaseModel):
    """That a receiver was not told, and why."""

    receiver: str = Field(
        description="Empty: nobody at all was told. 'webhook': the addresses in the rule config."
    )
    reason: str = Field(
        description="info (a note of that severity), dry_run, inhibited, silenced, acknowledged (not repeated), known (it fired on an earlier attempt already), "
        "unknown (there is no such receiver), or incident (its incident was notified of; the next notification names it)."
    )
    detail: str = Field(description="Which rule config, which silence, who, which attempt.")
    episode: int
    at_ns: int


class CoveringSilence(BaseModel):
    """The silence that covers an alert now; of several the one that ends last."""

    id: int
    author: str
    reason: str
    ends_ns: int
    holds_stop: bool = Field(description="Stops are held back as well.")


class StandingOutput(BaseModel):
    """An alert over all attempts."""

    fingerprint: str
    name: str
    rule: str
    severity: str
    labels: dict[str, str] = Field(description="By which it is routed, grouped and silenced.")
    phase: str = Field(description="firing or resolved.")
    episode: int = Field(description="How often it began to fire.")
    attempt: str = Field(description="On which it fired last.")
    step: int = Field(description="Of the last change.")
    fired_ns: int
    resolved_ns: int | None
    inhibited_by: str
    dry_run: bool
    message: str
    acknowledgement: Acknowledgement | None
    silence: CoveringSilence | None = Field(
        description="Nobody is told of it now, or would be if it fired; null where it is told."
    )
    muted: list[MutedOutput]


@notification_state_router.get("", summary="Look at an alert")
@permits("read")
def get_standing(project: str, run: str, fingerprint: Fingerprint, service: Served) -> StandingOutput:
    """Where an alert stands over all attempts of its run."""
    with service.database.read() as session:
        return _output(session, find_standing(session, project, run, fingerprint), project, run)


@notification_state_router.put("/acknowledgement", summary="Acknowledge an alert")
@permits("operate")
def acknowledge_alert(
    project: str,
    run: str,
    fingerprint: Fingerprint,
    body: AcknowledgementInput,
    service: Served,
    caller: Caller,
) -> StandingOutput:
    """Take an alert up: it is not repeated until it is over. When it fires anew, that needs a new acknowledgement."""
    with service.database.write() as session:
        row = find_standing(session, project, run, fingerprint)
        acknowledge(session, service.base_url, row, caller.who, body.comment)
        return _output(session, row, project, run)


@notification_state_router.delete("/acknowledgement", summary="Take an acknowledgement back")
@permits("operate")
def withdraw_acknowledgement(
    project: str, run: str, fingerprint: Fingerprint, service: Served
) -> StandingOutput:
    """The alert is repeated again."""
    with service.database.write() as session:
        row = find_standing(session, project, run, fingerprint)
        withdraw(session, row)
        return _output(session, row, project, run)


def _output(session: Session, row: AlertInstanceRow, project: str, run: str) -> StandingOutput:
    said = ("receiver", "reason", "detail", "episode", "at_ns")
    muted = session.execute(select(Muted).filter_by(instance_id=row.id).order_by(Muted.id)).scalars()
    taken = None
    if row.acknowledged_by:
        taken = Acknowledgement(
            who=row.acknowledged_by, at_ns=row.acknowledged_ns, comment=row.acknowledgement
        )
    apart = {"labels", "acknowledgement", "silence", "muted"}
    held: dict[str, Any] = {
        name: getattr(row, name) for name in StandingOutput.model_fields if name not in apart
    }
    labels = labels_of(row, project, run)
    return StandingOutput(
        labels=labels,
        acknowledgement=taken,
        silence=_silence(session, project, labels),
        muted=[MutedOutput(**{name: getattr(one, name) for name in said}) for one in muted],
        **held,
    )


def _silence(session: Session, project: str, labels: Mapping[str, str]) -> CoveringSilence | None:
    found = covering(active(session, project, read_clock(session)), labels)
    if found is None:
        return None
    row = session.get_one(Silence, found.id)
    return CoveringSilence(**{name: getattr(row, name) for name in CoveringSilence.model_fields})
