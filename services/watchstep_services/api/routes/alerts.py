"""Alerts of a run and of a project, and the notification state of one alert.

The notification state covers all attempts of the run: phase, acknowledgement, silence, and suppressed notifications with reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from watchstep.format.layout import check_name
from watchstep_services.api.lookup import find_alert, find_run
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
from watchstep_services.api.schemas.models import AlertList, AlertOutput, WasRight
from watchstep_services.api.schemas.paging import ListOrder, Paged, Paging
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import AlertInstanceRow, AlertRow, Incident, Muted, RunRow, Silence
from watchstep_services.notify.acknowledged import notify_acknowledged
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
    """Return the alerts of a run, most recently started first. Times are those of the last change."""
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
    """Return the alerts of all runs of a project, most recently started first. Times are those of the last change."""
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
    run_names = select(RunRow.id, RunRow.run).where(RunRow.id.in_({row.run_id for row in rows}))
    names = {row.id: row.run for row in session.execute(run_names)}
    keys = {row.incident for row in rows if row.incident}
    incidents = session.execute(select(Incident).where(Incident.key.in_(keys))).scalars() if keys else ()
    summaries = {(incident.run_id, incident.key): incident.summary for incident in incidents}
    instances = select(
        AlertInstanceRow.run_id, AlertInstanceRow.fingerprint, AlertInstanceRow.was_right
    ).where(
        AlertInstanceRow.fingerprint.in_({row.fingerprint for row in rows}), AlertInstanceRow.was_right != ""
    )
    answers = {(row.run_id, row.fingerprint): row.was_right for row in session.execute(instances)}
    alerts = []
    for row in rows:
        joined = {
            "run": names[row.run_id],
            "incident": summaries.get((row.run_id, row.incident)),
            "was_right": answers.get((row.run_id, row.fingerprint), ""),
        }
        alerts.append(_alert(row, joined))
    return AlertList(alerts=alerts, next_page_token=token)


def _alert(row: AlertRow, joined: Mapping[str, Any]) -> AlertOutput:
    columns = {name: getattr(row, name) for name in AlertOutput.model_fields if name not in joined}
    return AlertOutput.model_validate({**columns, **joined})


notification_state_router = APIRouter(
    prefix="/v1/projects/{project}/runs/{run}/alerts/{fingerprint}", tags=["alerts"]
)

Fingerprint = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="Fingerprint of the alert, from the list of alerts.")
]


class AcknowledgementInput(BaseModel):
    """An acknowledgement to record."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"examples": [{"comment": "looking at the data loader"}]},
    )

    comment: str = Field("", max_length=1000)


class Acknowledgement(BaseModel):
    """Acknowledgement of an alert."""

    who: str
    at_ns: int | None
    comment: str


class MutedOutput(BaseModel):
    """A notification that was suppressed."""

    receiver: str = Field(
        description="Receiver that was not notified. Empty: all receivers; 'webhook': the addresses in the rule config."
    )
    reason: str = Field(
        description="info (severity of the alert), dry_run, inhibited, silenced, acknowledged (not repeated), known (the alert already "
        "fired on an earlier attempt), unknown (the receiver does not exist), or incident (a notification of its incident was already sent; "
        "the next one contains the alert)."
    )
    detail: str = Field(description="The rule config, silence, user or attempt that is the reason.")
    episode: int
    at_ns: int


class CoveringSilence(BaseModel):
    """Silence that currently applies to an alert; of several, the one that ends last."""

    id: int
    author: str
    reason: str
    ends_ns: int
    suppresses_stop: bool = Field(description="Whether the silence also suppresses stops.")


class AlertInstanceOutput(BaseModel):
    """An alert over all attempts of its run."""

    fingerprint: str
    name: str
    rule: str
    severity: str
    labels: dict[str, str] = Field(description="Labels for routing, grouping and silences.")
    phase: str = Field(description="firing or resolved.")
    episode: int = Field(description="Number of times that the alert has started to fire.")
    attempt: str = Field(description="Attempt on which the alert last fired.")
    step: int = Field(description="Step of the last change.")
    fired_ns: int
    resolved_ns: int | None
    inhibited_by: str
    dry_run: bool
    message: str
    acknowledgement: Acknowledgement | None
    was_right: WasRight = Field(description="Answer of a person; empty: none yet.")
    silence: CoveringSilence | None = Field(
        description="Silence that suppresses notifications of the alert, or would if it fired; null: none."
    )
    muted: list[MutedOutput]


@notification_state_router.get("", summary="Get an alert")
@permits("read")
def get_alert(project: str, run: str, fingerprint: Fingerprint, service: Served) -> AlertInstanceOutput:
    """Return the state of an alert over all attempts of its run."""
    with service.database.read() as session:
        return _output(session, find_alert(session, project, run, fingerprint), project, run)


@notification_state_router.put("/acknowledgement", summary="Acknowledge an alert")
@permits("operate")
def acknowledge_alert(
    project: str,
    run: str,
    fingerprint: Fingerprint,
    body: AcknowledgementInput,
    service: Served,
    caller: Caller,
) -> AlertInstanceOutput:
    """Suppress repeated notifications until the alert resolves. If it fires again, it needs a new acknowledgement."""
    with service.database.write() as session:
        row = find_alert(session, project, run, fingerprint)
        acknowledge(session, service.base_url, row, caller.who, body.comment)
        notify_acknowledged(service, session, row)
        return _output(session, row, project, run)


@notification_state_router.delete("/acknowledgement", summary="Withdraw an acknowledgement")
@permits("operate")
def withdraw_acknowledgement(
    project: str, run: str, fingerprint: Fingerprint, service: Served
) -> AlertInstanceOutput:
    """Remove the acknowledgement, so that notifications are repeated again."""
    with service.database.write() as session:
        row = find_alert(session, project, run, fingerprint)
        withdraw(session, row)
        return _output(session, row, project, run)


class WasRightInput(BaseModel):
    """Whether an alert was right."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra={"examples": [{"answer": "no"}]})

    answer: WasRight = Field(description="Empty: withdraw the answer.")


@notification_state_router.put("/was-right", summary="Say whether an alert was right")
@permits("operate")
def answer_was_right(
    project: str, run: str, fingerprint: Fingerprint, body: WasRightInput, service: Served
) -> AlertInstanceOutput:
    """Record whether an alert was right, for all attempts of its run.

    Backtests compute their precision from these answers. Runs whose alerts were all not right count as healthy for `unlike_earlier_runs`.
    """
    with service.database.write() as session:
        row = find_alert(session, project, run, fingerprint)
        row.was_right = body.answer
        return _output(session, row, project, run)


def _output(session: Session, row: AlertInstanceRow, project: str, run: str) -> AlertInstanceOutput:
    muted = session.execute(select(Muted).filter_by(instance_id=row.id).order_by(Muted.id)).scalars()
    acknowledgement = None
    if row.acknowledged_by:
        acknowledgement = Acknowledgement(
            who=row.acknowledged_by, at_ns=row.acknowledged_ns, comment=row.acknowledgement
        )
    joined = {"labels", "acknowledgement", "silence", "muted"}
    columns: dict[str, Any] = {
        name: getattr(row, name) for name in AlertInstanceOutput.model_fields if name not in joined
    }
    labels = labels_of(row, project, run)
    return AlertInstanceOutput(
        labels=labels,
        acknowledgement=acknowledgement,
        silence=_silence(session, project, labels),
        muted=[
            MutedOutput(**{name: getattr(entry, name) for name in MutedOutput.model_fields})
            for entry in muted
        ],
        **columns,
    )


def _silence(session: Session, project: str, labels: Mapping[str, str]) -> CoveringSilence | None:
    silence = covering(active(session, project, read_clock(session)), labels)
    if silence is None:
        return None
    row = session.get_one(Silence, silence.id)
    return CoveringSilence(**{name: getattr(row, name) for name in CoveringSilence.model_fields})
