"""Microsoft Teams: an Adaptive Card, posted to the webhook of a workflow.

The address is that of the trigger "When a Teams webhook request is received" of the Workflows app (Power Automate). The older
connectors of Office 365 are retired, and did not accept all cards.

Names and messages come from training programs, so they are runs of a ``RichTextBlock``, which has no Markdown. A ``TextBlock`` would turn
them into links and emphasis.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from watchstep.errors import ConfigError
from watchstep_services.channels.delivery import DeliveryContext, Message, MessagePicture, try_post
from watchstep_services.channels.notification import Notification, NotifiedAlert
from watchstep_services.channels.receiver import PictureUse, Receiver, Secret
from watchstep_services.channels.wording import plain
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.egress import Address, parse_address

CARD = "application/vnd.microsoft.card.adaptive"
VERSION = "1.4"
"""The newest version that the Workflows app shows in all clients."""

MOST_BYTES = 20_000
"""Limit of a request. Teams drops messages over about 28 KB after it has accepted them, and counts some characters twice."""

_ALERTS = 10
_MOST_LINES = 100
_MOST_LINE = 1000
_MOST_TITLE = 250
_RETIRED = (".webhook.office.com", "outlook.office.com", "outlook.office365.com")
_COLOURS = {"critical": "Attention", "warning": "Warning", "info": "Accent"}

_SPACES = re.compile(r"\s+")

Element = dict[str, Any]


class TeamsReceiver(Receiver):
    """Posts an Adaptive Card to the webhook of a Microsoft Teams workflow."""

    secret_fields: ClassVar[tuple[str, ...]] = ("url",)
    picture: ClassVar[PictureUse] = "link"

    kind: Literal["teams"]
    url: Secret = Field(
        description="Address of the workflow's webhook. It is a secret, because it allows posting."
    )

    def check_secret(self, field: str, secret: str) -> None:  # noqa: ARG002 - there is only one secret
        """Check that the secret is the address of a workflow."""
        _address(secret)


def send(_receiver: TeamsReceiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Post the card once."""
    address = _address(delivery.secret("url"))
    return try_post(delivery, address, {"Content-Type": "application/json"}, encode_card(message))


def encode_card(message: Message) -> bytes:
    """The request in JSON, of at most `MOST_BYTES`: alerts at the end are left out first, then lines of text."""
    alerts, lines = _ALERTS, _MOST_LINES
    while True:
        body = json.dumps(render_payload(message, alerts, lines), ensure_ascii=False, separators=(",", ":"))
        encoded = body.encode(errors="replace")
        if len(encoded) <= MOST_BYTES or (not alerts and not lines):
            return encoded
        if alerts and not message.has_custom_text:
            alerts -= 1
        else:
            alerts, lines = 0, lines // 2


def render_payload(message: Message, alerts: int = _ALERTS, lines: int = _MOST_LINES) -> dict[str, Any]:
    """The payload of a message.

    Args:
        message: the message.
        alerts: limit of alerts on the card.
        lines: limit of lines of a custom text.
    """
    notification = message.notification
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": VERSION,
        "fallbackText": message.title[:_MOST_TITLE],
        "msteams": {"width": "Full"},
        "body": list(_body(message, alerts, lines)),
    }
    actions = _actions(notification)
    if actions:
        card["actions"] = actions
    return {
        "type": "message",
        "attachments": [{"contentType": CARD, "contentUrl": None, "content": card}],
    }


def _body(message: Message, alerts: int, lines: int) -> Iterator[Element]:
    notification = message.notification
    resolved = notification.status == "resolved"
    colour = "Good" if resolved else _COLOURS.get(notification.alerts[0].severity, "Default")
    yield _text(_run(message.title[:_MOST_TITLE], weight="Bolder", size="Large", color=colour))
    if message.has_custom_text:
        written = message.text.split("\n")
        yield from (_text(_run(line)) for line in written[:lines] if line.strip())
        if len(written) > lines:
            yield _text(_run(f"and {len(written) - lines} more lines", isSubtle=True))
    else:
        for alert in notification.alerts[:alerts]:
            yield from _alert(alert)
        if len(notification.alerts) > alerts:
            yield _text(_run(f"and {len(notification.alerts) - alerts} more", isSubtle=True))
    if message.picture is not None and message.picture.secure_url:
        yield _image(message.picture)
    yield _text(_run(notification.command, fontType="Monospace", size="Small"))


def _alert(alert: NotifiedAlert) -> Iterator[Element]:
    state = _run(f" ({alert.severity}) {alert.phase_words}")
    name = _run(alert.name, weight="Bolder")
    if alert.url:
        name["selectAction"] = {"type": "Action.OpenUrl", "url": alert.url}
    yield {**_text(name, state), "separator": True}
    explained = alert.explanation
    if explained is None or alert.message != explained.seen:
        yield _text(_run(alert.message))
    if explained is None:
        return
    for head, words in (
        ("What", explained.seen),
        ("Where", explained.where),
        ("Against", explained.against),
        ("Usually", " ".join(explained.usual_causes)),
        ("Try", " ".join(explained.what_to_try)),
    ):
        if words:
            yield _text(_run(f"{head} ", weight="Bolder"), _run(words))


def _image(picture: MessagePicture) -> Element:
    image: Element = {
        "type": "Image",
        "url": picture.secure_url,
        "altText": picture.text,
        "size": "Stretch",
        "msteams": {"allowExpand": True},
    }
    if picture.page:
        image["selectAction"] = {"type": "Action.OpenUrl", "url": picture.page}
    return image


def _actions(notification: Notification) -> list[Element]:
    if not notification.url:
        return []
    actions = [("Open the " + notification.page, notification.url)]
    if notification.page == "alert" and notification.run_url:
        actions.append(("Open the run", notification.run_url))
    return [{"type": "Action.OpenUrl", "title": title, "url": url} for title, url in actions]


def _text(*runs: Element) -> Element:
    return {"type": "RichTextBlock", "inlines": list(runs)}


def _run(text: str, **style: object) -> Element:
    return {"type": "TextRun", "text": _SPACES.sub(" ", plain(text))[:_MOST_LINE] or " ", **style}


def _address(secret: str) -> Address:
    try:
        address = parse_address(secret)
    except ValueError as error:
        raise ConfigError(f"secret 'url': {error}", "give the address of a workflow's webhook") from None
    if f".{address.host}".endswith(_RETIRED):
        raise ConfigError(
            "secret 'url': the address of an Office 365 connector, which Microsoft has retired",
            'create a workflow "Post to a channel when a webhook request is received" in Teams, and give its address',
        )
    return address
