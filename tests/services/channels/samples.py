"""Notifications to send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from watchstep_rules.engine.incident import Explanation
from watchstep_services.channels.delivery import MessagePicture
from watchstep_services.channels.notification import (
    Notification,
    NotifiedAlert,
    Status,
    alert_labels,
)

RUN_PAGE = "https://watch.example/projects/vision/runs/run-1"
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
            since_step=5,
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
        url=f"{RUN_PAGE}/alerts/f0",
    )
    return Notification(
        id="n-0001",
        project="vision",
        run="run-1",
        run_url=RUN_PAGE,
        service_url="http://watch.example",
        status=status,
        group_key="g-1",
        group_labels={"project": "vision", "run": "run-1"},
        alerts=tuple(
            replace(one, fingerprint=f"f{n}", step=5 + n, event_id=f"e-{n}", url=f"{RUN_PAGE}/alerts/f{n}")
            for n in range(alerts)
        ),
        at_ns=NOW,
    )


def without_public_url(notification: Notification) -> Notification:
    """The same notification from a service whose page nobody can reach."""
    return replace(
        notification, run_url="", alerts=tuple(replace(alert, url="") for alert in notification.alerts)
    )


def closed(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object that has no other properties than these."""
    return {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "properties": properties,
    }


PICTURE_URL = (
    "https://watch.example/v1/projects/vision/runs/run-1/alerts/f0/picture.png?expires=1&signature=abc"
)


def picture(*, inline: bool = False, url: str = PICTURE_URL) -> MessagePicture:
    """The picture of the first alert of a sample."""
    png = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8
    page = f"{RUN_PAGE}/alerts/f0"
    text = "no-nans: conv1.weight:gradient around step 5"
    return MessagePicture("f0", text, page, "" if inline else url, png if inline else b"")
