"""A notification as a CloudEvent 1.0 in structured mode: what webhooks and queues are sent."""

from __future__ import annotations

import json
from typing import Any

from watchstep_services.dispatcher.receivers.notification import Notification
from watchstep_services.events import rfc3339


def as_cloud_event(notification: Notification, title: str, text: str) -> dict[str, Any]:
    """The event, JSON-ready. Its id is the notification's: what comes twice carries the same."""
    subject = f"{notification.project}/{notification.run}" if notification.run else notification.project
    return {
        "specversion": "1.0",
        "id": notification.id,
        "source": notification.run_url,
        "type": f"watchstep.notification.{notification.status}",
        "subject": subject,
        "time": rfc3339(notification.at_ns),
        "datacontenttype": "application/json",
        "data": {**notification.as_data(), "title": title, "text": text},
    }


def within(event: dict[str, Any], limit: int) -> bytes:
    """The event in JSON, in so many bytes at most: explanations go first, then the last alerts, which are counted."""
    body = _encode(event)
    if len(body) <= limit:
        return body
    alerts = [{**alert, "explanation": None} for alert in event["data"]["alerts"]]
    kept = len(alerts)
    while len(body) > limit and kept:
        data = {**event["data"], "alerts": alerts[:kept], "left_out": len(alerts) - kept, "text": ""}
        body = _encode({**event, "data": data})
        kept = kept * 3 // 4
    return body


def _encode(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
