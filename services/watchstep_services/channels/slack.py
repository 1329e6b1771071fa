"""Slack and compatible services: Mattermost, Rocket.Chat, Discord's ``/slack`` addresses."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from watchstep.errors import ConfigError
from watchstep_services.channels.delivery import DeliveryContext, Message, MessagePicture, try_post
from watchstep_services.channels.notification import NotifiedAlert
from watchstep_services.channels.receiver import PictureUse, Receiver, Secret
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
    picture: ClassVar[PictureUse] = "link"

    kind: Literal["slack"]
    url: Secret = Field(
        description="Address of the incoming webhook. It is a secret, because it allows posting."
    )

    def check_secret(self, field: str, secret: str) -> None:  # noqa: ARG002 - there is only one secret
        """Check that the secret is an address."""
        _address(secret)


def send(_receiver: SlackReceiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Post the message once. If it is refused with a picture, it is posted again without."""
    ends = time.monotonic() + delivery.seconds
    address = _address(delivery.secret("url"))
    headers = {"Content-Type": "application/json"}
    result = try_post(delivery, address, headers, json.dumps(render_payload(message)).encode())
    if result.result == "failed" and message.picture is not None and message.picture.url:
        rest = replace(delivery, seconds=max(0.001, ends - time.monotonic()))
        body = json.dumps(render_payload(replace(message, picture=None))).encode()
        return try_post(rest, address, headers, body)
    return result


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
    footer = [f"`{_escape(notification.command)}`", _escape(notification.id)]
    if notification.url:
        footer.insert(0, _link(notification.url, f"Open the {notification.page}"))
    blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": " · ".join(footer)}]})
    resolved = notification.status == "resolved"
    colour = _RESOLVED if resolved else _COLOURS.get(notification.alerts[0].severity, "#808080")
    attachments: list[dict[str, Any]] = [{"color": colour, "blocks": blocks}]
    if message.picture is not None and message.picture.url:
        # Not an image block: Slack refuses a whole message with a block whose picture it cannot fetch, and Mattermost has no blocks.
        attachments.append(_picture(message.picture, colour))
    return {"text": _escape(message.title), "attachments": attachments}


def _picture(picture: MessagePicture, colour: str) -> dict[str, Any]:
    attachment = {
        "color": colour,
        "fallback": _escape(picture.text),
        "title": _escape(picture.text),
        "image_url": picture.url,
    }
    return {**attachment, "title_link": picture.page} if picture.page else attachment


def _alert_text(alert: NotifiedAlert) -> str:
    name = _link(alert.url, _escape(alert.name)) if alert.url else _escape(alert.name)
    lines = [f"*{name}* ({_escape(alert.severity)}) {alert.phase_words}"]
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
