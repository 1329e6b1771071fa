"""PagerDuty, by version 2 of its Events API (https://developer.pagerduty.com/docs/events-api-v2-overview).

A group of alerts is one alert of PagerDuty, recognized by its ``dedup_key``: it is triggered while one of the group's alerts fires,
acknowledged once a person has acknowledged all that fire, and resolved once none fires.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, Literal

from pydantic import Field

from watchstep.errors import ConfigError
from watchstep_rules.rule import SEVERITIES
from watchstep_services.channels.delivery import DeliveryContext, Message, try_post
from watchstep_services.channels.notification import Notification, NotifiedAlert
from watchstep_services.channels.receiver import HttpAddress, PictureUse, Receiver, Secret
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.egress import parse_address
from watchstep_services.core.events import rfc3339

ENQUEUE = "https://events.pagerduty.com/v2/enqueue"
MOST_BYTES = 400_000
"""Limit of an event; PagerDuty accepts 512 KB."""

MOST_SUMMARY = 1024
"""Characters of a summary that PagerDuty shows; it cuts longer ones."""

_MOST_ALERTS = 50
_MOST_LINKS = 20
_MOST_KEY = 255
_ROUTING_KEY = re.compile(r"[A-Za-z0-9]{32}")

EventAction = Literal["trigger", "acknowledge", "resolve"]


class PagerDutyReceiver(Receiver):
    """Triggers, acknowledges and resolves alerts of PagerDuty."""

    secret_fields: ClassVar[tuple[str, ...]] = ("routing_key",)
    picture: ClassVar[PictureUse] = "link"
    acknowledges: ClassVar[bool] = True

    kind: Literal["pagerduty"]
    routing_key: Secret = Field(description="Integration key of an Events API v2 integration: 32 characters.")
    url: HttpAddress = Field(
        ENQUEUE,
        description="Address of the Events API; https://events.eu.pagerduty.com/v2/enqueue for accounts in the EU.",
    )

    @property
    def destination(self) -> tuple[Any, ...]:
        """The address."""
        return (self.url,)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of the address."""
        return (parse_address(self.url).host,)

    def check_secret(self, field: str, secret: str) -> None:  # noqa: ARG002 - there is only one secret
        """Check the form of the routing key."""
        _checked_key(secret)


def send(receiver: PagerDutyReceiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Send the event once. PagerDuty joins repeated events by their ``dedup_key``."""
    body = encode_event(message, _checked_key(delivery.secret("routing_key")))
    return try_post(delivery, parse_address(receiver.url), {"Content-Type": "application/json"}, body)


def encode_event(message: Message, routing_key: str) -> bytes:
    """The event in JSON, of at most `MOST_BYTES`: alerts at the end are left out, and counted."""
    count = min(_MOST_ALERTS, len(message.notification.alerts))
    while True:
        body = json.dumps(render_event(message, routing_key, count), separators=(",", ":")).encode()
        if len(body) <= MOST_BYTES or not count:
            return body
        count = count * 3 // 4


def render_event(message: Message, routing_key: str, alerts: int = _MOST_ALERTS) -> dict[str, Any]:
    """The event of a message.

    Args:
        message: the message.
        routing_key: the integration key.
        alerts: limit of alerts in its details.
    """
    notification = message.notification
    event: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": event_action(notification),
        "dedup_key": dedup_key(notification),
        "client": "Watchstep",
        "payload": _payload(message, alerts),
    }
    if notification.url:
        event["client_url"] = notification.url
        event["links"] = _links(notification)
    if message.picture is not None and message.picture.secure_url:
        image = {"src": message.picture.secure_url, "alt": message.picture.text}
        event["images"] = [{**image, "href": message.picture.page} if message.picture.page else image]
    return event


def event_action(notification: Notification) -> EventAction:
    """What the event does with the alert of PagerDuty."""
    if notification.status == "resolved":
        return "resolve"
    return "acknowledge" if all(alert.acknowledged_by for alert in notification.firing) else "trigger"


def dedup_key(notification: Notification) -> str:
    """The key of the group. Keys of groups are unique within a project, and an integration may serve several projects."""
    return f"{notification.project}/{notification.group_key}"[-_MOST_KEY:]


def _payload(message: Message, alerts: int) -> dict[str, Any]:
    notification = message.notification
    first = notification.alerts[0]
    counted = notification.firing or notification.alerts
    return {
        "summary": message.title[:MOST_SUMMARY] or "Watchstep",
        "source": f"{notification.project}/{notification.run}" if notification.run else notification.project,
        "severity": max((alert.severity for alert in counted), key=SEVERITIES.index),
        "timestamp": rfc3339(notification.at_ns),
        "component": first.name,
        "group": notification.project,
        "class": first.rule,
        "custom_details": _details(message, alerts),
    }


def _details(message: Message, alerts: int) -> dict[str, Any]:
    notification = message.notification
    details: dict[str, Any] = {
        "notification": notification.id,
        "command": notification.command,
        "firing": len(notification.firing),
    }
    if message.has_custom_text:
        return {**details, "text": message.text}
    incidents = {
        alert.incident.id: alert.incident for alert in notification.alerts if alert.incident is not None
    }
    incident_texts = [
        "\n".join(incident.as_lines()) for incident in incidents.values() if len(incident.alerts) > 1
    ]
    if incident_texts:
        details["incidents"] = incident_texts[:_MOST_ALERTS]
    details["alerts"] = [_alert_details(alert) for alert in notification.alerts[:alerts]]
    if len(notification.alerts) > alerts:
        details["alerts_left_out"] = len(notification.alerts) - alerts
    return details


def _alert_details(alert: NotifiedAlert) -> dict[str, Any]:
    details: dict[str, Any] = {
        "name": alert.name,
        "rule": alert.rule,
        "severity": alert.severity,
        "phase": alert.phase,
        "attempt": alert.attempt,
        "step": alert.step,
        "message": alert.message,
        "labels": dict(alert.labels),
    }
    if alert.explanation is not None:
        explained = alert.explanation
        details |= {
            "seen": explained.seen,
            "where": explained.where,
            "against": explained.against,
            "since": explained.since,
            "usual_causes": list(explained.usual_causes),
            "what_to_try": list(explained.what_to_try),
        }
    if alert.acknowledged_by:
        details["acknowledged_by"] = alert.acknowledged_by
    return details


def _links(notification: Notification) -> list[dict[str, str]]:
    """Links to the alerts' pages, and to the run's."""
    links = [
        {"href": alert.url, "text": f"{alert.name} at step {alert.step}"}
        for alert in notification.alerts[: _MOST_LINKS - 1]
        if alert.url
    ]
    name = f"Run {notification.run}" if notification.run else f"Runs of {notification.project}"
    return [*links, {"href": notification.run_url, "text": name}] if notification.run_url else links


def _checked_key(secret: str) -> str:
    if not _ROUTING_KEY.fullmatch(secret):
        raise ConfigError(
            "secret 'routing_key': not an integration key, which has 32 letters and digits",
            "copy the integration key of an Events API v2 integration of the PagerDuty service",
        )
    return secret
