"""The labels by which alerts are routed, grouped and silenced."""

from __future__ import annotations

from watchstep_services.database.models import Standing
from watchstep_services.dispatcher.receivers.notification import alert_labels


def labels_of(row: Standing, project: str, run: str) -> dict[str, str]:
    """An alert's labels: the rule config's own, and those that every alert has."""
    own = {"project": project, "run": run, "name": row.name, "rule": row.rule, "severity": row.severity}
    return alert_labels(own, row.labels)
