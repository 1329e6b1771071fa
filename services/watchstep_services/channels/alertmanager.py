"""Prometheus Alertmanager: alerts by version 2 of its API, sent repeatedly while they fire."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from watchstep_services.channels.delivery import DeliveryContext, Message, try_post
from watchstep_services.channels.notification import Notification, NotifiedAlert
from watchstep_services.channels.receiver import HttpAddress, Receiver, Secret
from watchstep_services.channels.webhook import header_value
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.egress import parse_address
from watchstep_services.core.events import rfc3339

LIVES = 4
"""Intervals after which an alert that is not sent again is resolved, as in Prometheus."""

_NANOSECONDS = 1_000_000_000


class AlertmanagerReceiver(Receiver):
    """Posts alerts to an Alertmanager, which groups, silences and routes them itself."""

    secret_fields: ClassVar[tuple[str, ...]] = ("authorization",)

    kind: Literal["alertmanager"]
    url: HttpAddress = Field(description="URL of the Alertmanager, without /api/v2/alerts.")
    authorization: Secret | None = Field(None, description="Sent as the header Authorization.")
    resend_seconds: float = Field(
        60.0,
        ge=5,
        le=3600,
        description="Interval at which firing alerts are sent again; the route's times are not used.",
    )

    @field_validator("url")
    @classmethod
    def _has_no_query(cls, url: str) -> str:
        if "?" in url:
            raise ValueError("the URL must not have a query, because the API's path is appended to it")
        return url

    @property
    def destination(self) -> tuple[Any, ...]:
        """The address."""
        return (self.url,)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of the address."""
        return (parse_address(self.url).host,)

    def check_secret(self, field: str, secret: str) -> None:
        """Check the characters of a header."""
        header_value(field, secret)


def send(receiver: AlertmanagerReceiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Post the alerts once."""
    headers = {"Content-Type": "application/json"}
    if "authorization" in delivery.secrets:
        headers["Authorization"] = header_value("authorization", delivery.secret("authorization"))
    body = json.dumps(alerts_of(message.notification, receiver.resend_seconds, delivery.now_ns)).encode()
    address = parse_address(f"{receiver.url.rstrip('/')}/api/v2/alerts")
    return try_post(delivery, address, headers, body)


def alerts_of(notification: Notification, resend_seconds: float, now_ns: int) -> list[dict[str, Any]]:
    """The alerts in Alertmanager's format. Labels identify alerts, so they contain nothing that changes."""
    ends_ns = now_ns + round(LIVES * resend_seconds * _NANOSECONDS)
    return [_alert(notification, alert, ends_ns) for alert in notification.alerts]


def _alert(notification: Notification, alert: NotifiedAlert, ends_ns: int) -> dict[str, Any]:
    annotations = {"summary": alert.message, "step": str(alert.step), "event_id": alert.event_id}
    if alert.explanation is not None:
        annotations |= {"description": alert.explanation.as_text(), "where": alert.explanation.where}
    starts_ns = alert.fired_ns or alert.since_ns
    resolved_ns = alert.resolved_ns or notification.at_ns
    # An alert that ends at the time of its start would be refused.
    ended_ns = max(resolved_ns, starts_ns + _NANOSECONDS) if alert.phase == "resolved" else ends_ns
    labels = {**alert.labels, "alertname": alert.name, "attempt": alert.attempt}
    # The address of the alert's page; the field is optional, and must not be empty.
    page = {"generatorURL": alert.url} if alert.url else {}
    return {
        "labels": {name: value for name, value in labels.items() if value},
        "annotations": {name: value for name, value in annotations.items() if value},
        "startsAt": rfc3339(starts_ns),
        "endsAt": rfc3339(ended_ns),
        **page,
    }
