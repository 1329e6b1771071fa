"""What a sender is given to reach the world with, and what it is to say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from watchstep.errors import ConfigError
from watchstep_services.channels.notification import Notification
from watchstep_services.core.egress import EgressPolicy


@dataclass(frozen=True)
class DeliveryContext:
    """One try's way out.

    Attributes:
        reach: where it may be sent to.
        seconds: how long a receiver may take.
        now_ns: by the database's clock.
        secrets: the receiver's, opened, by field. They are shown nowhere.
    """

    reach: EgressPolicy
    seconds: float
    now_ns: int
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def secret(self, name: str) -> str:
        """A secret of the receiver.

        Raises:
            ConfigError: it is not there.
        """
        try:
            return self.secrets[name]
        except KeyError:
            raise ConfigError(f"secret {name!r}: not set", "give it to the receiver") from None


@dataclass(frozen=True)
class Message:
    """A notification, put into words.

    Attributes:
        notification: what is told.
        title: one line.
        text: a few lines.
        worded: whether title and text are the receiver's own, and not the default ones.
        event: the notification as a CloudEvent, JSON-ready.
    """

    notification: Notification
    title: str
    text: str
    worded: bool
    event: dict[str, Any]
