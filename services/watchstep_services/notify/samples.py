"""Sample notifications: a test notification, or one of an earlier alert."""

from __future__ import annotations

import uuid
from dataclasses import replace

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep_rules.engine.incident import Explanation, phase_words
from watchstep_services.channels.notification import (
    Notification,
    NotifiedAlert,
    Status,
    alert_labels,
)
from watchstep_services.db.models import AlertRow, RuleConfigRow, RunRow
from watchstep_services.service.context import Service
from watchstep_services.service.judging import load_config

_SECOND = 1_000_000_000


def example(service: Service, project: str, status: Status, at_ns: int) -> Notification:
    """A test notification with an id of its own."""
    own = {"project": project, "run": "test", "name": "test", "rule": "nan_or_inf", "severity": "info"}
    alert = NotifiedAlert(
        name="test",
        rule="nan_or_inf",
        severity="info",
        phase=status,
        attempt="test",
        step=0,
        labels=alert_labels(own, {}),
        message="This is a test notification. No run has a problem.",
        explanation=Explanation(
            title=f"test (info) {phase_words(status, 0, 0)}",
            since_step=0,
            seen="nothing: a user tests this receiver",
            where="no tensor",
            against="nothing",
            since="step 0",
            usual_causes=("A user tests whether notifications arrive.",),
            what_to_try=("No action is required.",),
        ),
        fingerprint="test",
        since_ns=at_ns - _SECOND,
        fired_ns=at_ns - _SECOND,
        resolved_ns=at_ns if status == "resolved" else None,
    )
    # All tests are one group, so that PagerDuty resolves a test that fires by one that is resolved. There is no run "test".
    return replace(
        _alone(service, alert, f"test-{uuid.uuid4()}", at_ns),
        group_key="test",
        run_url=service.links.project(project),
    )


def of_alert(service: Service, session: Session, run: RunRow, name: str, at_ns: int) -> Notification:
    """A notification of the newest alert of a rule config on a run.

    Raises:
        NotFoundError: it has never fired.
    """
    row = _newest(session, run, name)
    details = row.details or {}
    own = {
        "project": run.project,
        "run": run.run,
        "name": row.name,
        "rule": row.rule,
        "severity": row.severity,
    }
    alert = NotifiedAlert(
        name=row.name,
        rule=row.rule,
        severity=row.severity,
        phase="resolved" if row.phase == "resolved" else "firing",
        attempt=row.attempt,
        step=row.since_step,
        labels=alert_labels(own, details.get("labels", {})),
        message=str(details.get("message", "")),
        explanation=Explanation.model_validate(details["explanation"]) if details else None,
        fingerprint=row.fingerprint or f"{run.id}-{row.config_id}",
        url=service.links.alert(run.project, run.run, row.fingerprint) if row.fingerprint else "",
        since_ns=row.since_ns,
        fired_ns=row.fired_ns,
        resolved_ns=row.resolved_ns,
    )
    return _alone(service, alert, f"preview-{uuid.uuid4()}", at_ns)


def named_receivers(session: Session, run: RunRow, name: str) -> tuple[str, ...]:
    """Receivers that the alert's rule config names."""
    config = load_config(session.get_one(RuleConfigRow, _newest(session, run, name).config_id), None).config
    return () if config is None else tuple(config.receivers)


def _newest(session: Session, run: RunRow, name: str) -> AlertRow:
    row = session.execute(
        select(AlertRow)
        .where(AlertRow.run_id == run.id, AlertRow.name == name, AlertRow.fired_ns.is_not(None))
        .order_by(AlertRow.id.desc())
        .limit(1)
    ).scalar_one_or_none()
    if row is None:
        raise NotFoundError(
            f"alert {name!r} of run {run.project}/{run.run}: has never fired", "name an alert that has fired"
        )
    return row


def _alone(service: Service, alert: NotifiedAlert, number: str, at_ns: int) -> Notification:
    project, run = alert.labels["project"], alert.labels["run"]
    return Notification(
        id=number,
        project=project,
        run=run,
        run_url=service.links.run(project, run),
        service_url=service.base_url,
        status="resolved" if alert.phase == "resolved" else "firing",
        group_key=number,
        group_labels={"project": project, "run": run},
        alerts=(alert,),
        at_ns=at_ns,
    )
