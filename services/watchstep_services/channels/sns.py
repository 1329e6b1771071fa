"""Amazon SNS: to a topic, whose subscribers may be e-mail, SMS or queues, or as SMS to one phone."""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from watchstep_services.channels.aws import (
    ARN_PARTITION,
    MOST_BYTES,
    AwsReceiver,
    attempt,
    region_of,
)
from watchstep_services.channels.notification import Notification, within
from watchstep_services.channels.outside import DeliveryContext, Message
from watchstep_services.core.due_action import AttemptResult

MOST_SUBJECT = 99
MOST_SMS = 160
"""Characters of one SMS in GSM's alphabet, of which only those that ASCII shares are used."""

_TOPIC = rf"^{ARN_PARTITION}:sns:[a-z0-9-]+:[0-9]{{12}}:[A-Za-z0-9_-]+(\.fifo)?$"
_DOUBLE = "[]{}\\^~|"
"""Characters that GSM writes as two."""


class SnsReceiver(AwsReceiver):
    """Publishes to a topic, or sends an SMS."""

    kind: Literal["sns"]
    topic_arn: Annotated[str, StringConstraints(pattern=_TOPIC, max_length=400)] | None = None
    phone_number: Annotated[str, StringConstraints(pattern=r"^\+[1-9][0-9]{6,14}$")] | None = Field(
        None, description="With + and the country; gets one SMS of the title, cut to 160 characters."
    )
    region: Annotated[str, StringConstraints(pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$")] | None = Field(
        None, description="Of SMS; a topic's ARN names its own."
    )
    content: Literal["text", "event"] = Field(
        "text", description="To a topic: the text for people, or the CloudEvent for machines."
    )

    @model_validator(mode="after")
    def _one_place(self) -> SnsReceiver:
        if (self.topic_arn is None) == (self.phone_number is None):
            raise ValueError("give either 'topic_arn' or 'phone_number'")
        if (self.phone_number is None) != (self.region is None):
            raise ValueError("'region' goes with 'phone_number'")
        return self


def send(receiver: SnsReceiver, letter: Message, outside: DeliveryContext) -> AttemptResult:
    """Publish once."""
    region = receiver.region or region_of(receiver.topic_arn or "")
    asked = (
        _sms(receiver, letter) if receiver.topic_arn is None else _topic(receiver, receiver.topic_arn, letter)
    )

    def publish(client: Any) -> AttemptResult:
        return AttemptResult("done", f"sns: message {client.publish(**asked)['MessageId']}")

    return attempt(receiver, outside, "sns", region, publish)


def sms(text: str) -> str:
    """A text as one SMS: in ASCII without control characters, cut where one SMS ends."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in plain).split()).replace(
        "`", "'"
    )
    if _length(words) <= MOST_SMS:
        return words
    while _length(words) > MOST_SMS - 3:
        words = words[:-1]
    return words + "..."


def attributes(notification: Notification) -> dict[str, dict[str, str]]:
    """What subscriptions may filter by."""
    first = notification.alerts[0]
    held = {
        "status": notification.status,
        "project": notification.project,
        "run": notification.run,
        "severity": first.severity,
        "rule": first.rule,
        "notification_id": notification.id,
    }
    return {name: {"DataType": "String", "StringValue": value} for name, value in held.items() if value}


def fifo(notification: Notification) -> dict[str, str]:
    """Order within a group of alerts, and an id by which AWS drops what comes twice within five minutes."""
    return {
        "MessageGroupId": hashlib.sha256(notification.group_key.encode()).hexdigest(),
        "MessageDeduplicationId": hashlib.sha256(notification.id.encode()).hexdigest(),
    }


def _length(text: str) -> int:
    return len(text) + sum(text.count(letter) for letter in _DOUBLE)


def _sms(receiver: SnsReceiver, letter: Message) -> dict[str, Any]:
    kind = {"AWS.SNS.SMS.SMSType": {"DataType": "String", "StringValue": "Transactional"}}
    return {"PhoneNumber": receiver.phone_number, "Message": sms(letter.title), "MessageAttributes": kind}


def _topic(receiver: SnsReceiver, topic: str, letter: Message) -> dict[str, Any]:
    told = letter.notification
    # A subject is ASCII and begins with a letter, a digit or a mark.
    subject = unicodedata.normalize("NFKD", letter.title).encode("ascii", "ignore").decode()
    text = within(letter.event, MOST_BYTES).decode() if receiver.content == "event" else letter.text
    return {
        "TopicArn": topic,
        "Subject": " ".join(subject.split())[:MOST_SUBJECT] or "Watchstep",
        "Message": text or letter.title,
        "MessageAttributes": attributes(told),
        **(fifo(told) if topic.endswith(".fifo") else {}),
    }
