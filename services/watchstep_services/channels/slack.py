"""Slack and compatible services: Mattermost, Rocket.Chat, Discord's ``/slack`` addresses."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field

from watchstep.errors import ConfigError
from watchstep_services.channels.delivery import DeliveryContext, Message, try_post
from watchstep_services.channels.notification import NotifiedAlert
from watchstep_services.channels.receiver import Receiver, Secret
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.egress import Address, parse_address

_HEADER = 150
_SECTION = 2900
_ALERTS = 10
_COLOURS = {"critical": "#d0312d", "warning": "#e8a317", "info": "#4a7ebb"}
_RESOLVED = "#2e8b57"


class SlackReceiver(Receiver):
    """Posts a message with blocks to an incoming webhook."""

    secret_fields: ClassVar[tuple[str, ...]] = ("url",)

    kind: Literal["slack"]
    url: Secret = Field(
        description="Address of the incoming webhook. It is a secret, because it allows posting."
    )

    def check_secret(self, field: str, secret: str) -> None:  # noqa: ARG002 - there is only one secret
        """Check that the secret is an address."""
        _address(secret)


def send(_receiver: SlackReceiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Post the message once."""
    body = json.dumps(render_payload(message)).encode()
    return try_post(delivery, _address(delivery.secret("url")), {"Content-Type": "application/json"}, body)


def render_payload(message: Message) -> dict[str, Any]:
    """The payload of a message: finding, location, causes, and how to view the evidence."""
    notification = message.notification
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": message.title[:_HEADER], "emoji": False}}
    ]
    if message.has_custom_text:
        blocks.append(_section(_escape(message.text)))
    else:
        blocks += [_section(_alert_text(alert)) for alert in notification.alerts[:_ALERTS]]
        if len(notification.alerts) > _ALERTS:
            blocks.append(_section(f"and {len(notification.alerts) - _ALERTS} more"))
    blocks.append(
        {
            "type": "context",
            "elements": [
                {
                    "type": "mrkdwn",
                    "text": f"`{_escape(notification.command)}` · {_link(notification.run_url, 'in the API')} · {_escape(notification.id)}",
                }
            ],
        }
    )
    resolved = notification.status == "resolved"
    colour = _RESOLVED if resolved else _COLOURS.get(notification.alerts[0].severity, "#808080")
    return {"text": _escape(message.title), "attachments": [{"color": colour, "blocks": blocks}]}


def _alert_text(alert: NotifiedAlert) -> str:
    lines = [f"*{_escape(alert.name)}* ({_escape(alert.severity)}) {alert.phase} at step {alert.step}"]
    explained = alert.explanation
    if explained is None or alert.message != explained.seen:
        lines.append(_escape(alert.message))
    if explained is not None:
        lines += [
            f"*What* {_escape(explained.seen)}",
            f"*Where* {_escape(explained.where)}",
            f"*Against* {_escape(explained.against)}",
        ]
        for head, sentences in (("Usually", explained.usual_causes), ("Try", explained.what_to_try)):
            if sentences:
                lines.append(f"*{head}* {_escape(' '.join(sentences))}")
    return "\n".join(lines)


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:_SECTION] or " "}}


def _link(url: str, text: str) -> str:
    return f"<{_escape(url).replace('|', '%7C')}|{text}>"


def _escape(text: str) -> str:
    """Escape as Slack requires: names come from training programs, and must not mention channels or create links."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _address(secret: str) -> Address:
    try:
        return parse_address(secret)
    except ValueError as error:
        raise ConfigError(f"secret 'url': {error}", "give the address of an incoming webhook") from None
