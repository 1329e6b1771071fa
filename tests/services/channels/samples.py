"""Notifications to send."""

from __future__ import annotations

from dataclasses import replace

from watchstep_rules.engine.incident import Explanation
from watchstep_services.channels.notification import (
    Notification,
    NotifiedAlert,
    Status,
    alert_labels,
)

NOW = 1_800_000_000_000_000_000
_OWN = {
    "project": "vision", "run": "run-1", "name": "no-nans", "rule": "non_finite_values", "severity": "critical",
}  # fmt: skip


def sample(
    status: Status = "firing", alerts: int = 1, *, message: str = "nan in gradients of conv1"
) -> Notification:
    """A notification of a few alerts."""
    one = NotifiedAlert(
        name="no-nans",
        rule="non_finite_values",
        severity="critical",
        phase=status,
        attempt="a1",
        step=5,
        labels=alert_labels(_OWN, {"team": "vision"}),
        message=message,
        explanation=Explanation(
            title=f"no-nans (critical) {status} at step 5",
            seen="3 of 64 elements are NaN",
            where="gradient/conv1.weight, of Conv2d conv1",
            against="0 allowed",
            since="step 5",
            usual_causes=("The learning rate is too high.",),
            what_to_try=("Lower the learning rate.",),
        ),
        fingerprint="f0",
        since_ns=NOW - 2_000_000_000,
        fired_ns=NOW - 1_000_000_000,
        resolved_ns=NOW if status == "resolved" else None,
        event_id="e-1",
    )
    return Notification(
        id="n-0001",
        project="vision",
        run="run-1",
        run_url="http://watch.example/v1/projects/vision/runs/run-1",
        status=status,
        group_key="g-1",
        group_labels={"project": "vision", "run": "run-1"},
        alerts=tuple(replace(one, fingerprint=f"f{n}", step=5 + n, event_id=f"e-{n}") for n in range(alerts)),
        at_ns=NOW,
    )
