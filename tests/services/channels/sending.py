"""Delivery contexts for tests, and a helper to send."""

from __future__ import annotations

import ipaddress
from typing import Any

from tests.services.channels.samples import NOW, sample
from watchstep_services.channels.delivery import DeliveryContext, MessagePicture
from watchstep_services.channels.notification import Notification
from watchstep_services.channels.receiver_file import RECEIVER
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.egress import EgressPolicy
from watchstep_services.notify.flush import deliver

LOOPBACK = EgressPolicy(networks=(ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")))


def delivery_context(
    policy: EgressPolicy = LOOPBACK, seconds: float = 30.0, **secrets: str
) -> DeliveryContext:
    return DeliveryContext(policy, seconds, NOW, secrets)


def send(
    config: dict[str, Any],
    delivery: DeliveryContext,
    notification: Notification | None = None,
    picture: MessagePicture | None = None,
) -> AttemptResult:
    """Send to a receiver with this config."""
    receiver = RECEIVER.validate_python({"name": "r", **config})
    return deliver(receiver, notification or sample(), delivery, picture)
