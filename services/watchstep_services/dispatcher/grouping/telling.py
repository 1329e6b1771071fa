"""A group's alerts as the notification that its receiver gets."""

from __future__ import annotations

from collections.abc import Sequence

from watchstep_rules.engine.explanation import Explanation
from watchstep_rules.engine.incident import IncidentSummary
from watchstep_services.database.models import AlertGroup, Run, Standing
from watchstep_services.dispatcher.grouping.labels import labels_of
from watchstep_services.dispatcher.receivers.notification import Notification, NotifiedAlert, Status
from watchstep_services.events import run_url


def alert_of(
    row: Standing, run: Run, said: Status, now_ns: int, incident: IncidentSummary | None = None
) -> NotifiedAlert:
    """An alert as it stands; of one that is told to fire and is over by now, ``resolved_ns`` says since when."""
    ended = row.resolved_ns
    if said == "resolved" and ended is None:
        ended = now_ns  # it fires again, and of that nobody is told
    return NotifiedAlert(
        name=row.name,
        rule=row.rule,
        severity=row.severity,
        phase=said,
        attempt=row.attempt,
        step=row.step,
        labels=labels_of(row, run.project, run.run),
        message=row.message,
        explanation=Explanation.model_validate(row.explanation) if row.explanation else None,
        fingerprint=row.fingerprint,
        since_ns=row.since_ns,
        fired_ns=row.fired_ns,
        resolved_ns=ended,
        event_id=row.event_id,
        acknowledged_by=row.acknowledged_by,
        incident=incident,
    )


def notification_of(
    base_url: str, group: AlertGroup, runs: Sequence[Run], alerts: Sequence[NotifiedAlert], now_ns: int
) -> Notification:
    """A notification of these alerts, those that fire first; its id is the group's number and generation."""
    alone = runs[0].run if len(runs) == 1 else ""
    return Notification(
        id=f"{group.id}-{group.generation}-{group.key[:16]}",
        project=group.project,
        run=alone,
        run_url=run_url(base_url, group.project, alone)
        if alone
        else f"{base_url}/v1/projects/{group.project}",
        status="firing" if any(alert.phase == "firing" for alert in alerts) else "resolved",
        group_key=group.key,
        group_labels=group.labels,
        alerts=tuple(alerts),
        at_ns=now_ns,
        repeat=group.repeats,
    )
