"""Ways out for tests, and short ways to send."""

from __future__ import annotations

import ipaddress
from typing import Any

from tests.services.channels.samples import NOW, sample
from watchstep_services.channels.delivery import DeliveryContext
from watchstep_services.channels.kinds import RECEIVER
from watchstep_services.channels.notification import Notification
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.egress import EgressPolicy
from watchstep_services.notify.flush import deliver

LOOPBACK = EgressPolicy(networks=(ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")))


def outside(reach: EgressPolicy = LOOPBACK, seconds: float = 30.0, **secrets: str) -> DeliveryContext:
    return DeliveryContext(reach, seconds, NOW, secrets)


def send(
    config: dict[str, Any], way: DeliveryContext, notification: Notification | None = None
) -> AttemptResult:
    """Send to a receiver that is written so."""
    receiver = RECEIVER.validate_python({"name": "r", **config})
    return deliver(receiver, notification or sample(), way)
