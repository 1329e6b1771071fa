"""AWS receivers: SNS topics and phone numbers, SQS queues, EventBridge buses."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from watchstep.errors import ConfigError
from watchstep_services.channels.delivery import DeliveryContext, Message
from watchstep_services.channels.notification import Notification, within
from watchstep_services.channels.receiver import Receiver
from watchstep_services.core.due_action import AttemptResult

MOST_BYTES = 250_000
"""Limit of a message to SNS, SQS or EventBridge, including attributes; AWS accepts 262,144."""

ARN_PARTITION = r"arn:aws(?:-cn|-us-gov)?"
_SESSION = "watchstep-receivers"
_ROLE_SECONDS = 900

_TRANSIENT = re.compile(
    r"Throttl|TooManyRequests|RequestLimitExceeded|InternalError|InternalFailure|InternalException|ServiceUnavailable|Timeout"
    r"|SlowDown|KMSThrottling|RequestExpired|ExpiredToken"
)

RoleArn = Annotated[
    str,
    StringConstraints(
        pattern=rf"^{ARN_PARTITION}:iam::[0-9]{{12}}:role/[A-Za-z0-9_+=,.@/-]+$", max_length=600
    ),
]


class AwsReceiver(Receiver):
    """Base class of AWS receivers. They use the service's permissions, so only admins write them."""

    administered = True

    role_arn: RoleArn | None = Field(
        None,
        description="Role to assume for each message; by default the service's own credentials are used.",
    )
    external_id: Annotated[str, StringConstraints(min_length=2, max_length=1224)] | None = Field(
        None, description="External id that the role's trust policy requires."
    )


def region_of(arn: str) -> str:
    """The region in an ARN."""
    return arn.split(":")[3]


def call_service(
    receiver: AwsReceiver,
    delivery: DeliveryContext,
    service: str,
    region: str,
    call: Callable[[Any], AttemptResult],
) -> AttemptResult:
    """Create a client and call it.

    Args:
        receiver: the receiver with the role.
        delivery: the delivery context.
        service: boto3's name of the service.
        region: the receiver's region.
        call: function that uses the client.

    Raises:
        ConfigError: boto3 is not installed.
    """
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise ConfigError(
            f"receiver {receiver.name!r}: boto3 is not installed", "install watchstep[aws] for the service"
        ) from None
    try:
        return call(_client(receiver, delivery, service, region))
    except ClientError as error:
        return failure(service, error.response)
    except BotoCoreError as error:
        return AttemptResult("error", f"{service}: {type(error).__name__}: {error}")


def failure(service: str, response: dict[str, Any]) -> AttemptResult:
    """The result for an error response of AWS."""
    error = response.get("Error", {})
    code, message = str(error.get("Code", "")), str(error.get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    detail = f"{service}: {code}: {' '.join(message.split())[:300]}"
    if status >= 500 or status == 429 or is_transient(code):
        return AttemptResult("error", detail)
    return AttemptResult("failed", f"{detail}; AWS refused it, so it is not sent again")


def is_transient(code: str) -> bool:
    """Whether an error with this code may be transient."""
    return _TRANSIENT.search(code) is not None


def _client(receiver: AwsReceiver, delivery: DeliveryContext, service: str, region: str) -> Any:
    import boto3
    from botocore.config import Config

    # One try, because the outbox retries; each call gets a part of the time.
    seconds = max(1.0, delivery.seconds / 3)
    config = Config(
        connect_timeout=seconds, read_timeout=seconds, retries={"mode": "standard", "total_max_attempts": 1}
    )
    session = boto3.session.Session(region_name=region)
    if receiver.role_arn is None:
        return session.client(service, config=config)
    parameters = {
        "RoleArn": receiver.role_arn,
        "RoleSessionName": _SESSION,
        "DurationSeconds": _ROLE_SECONDS,
    }
    if receiver.external_id is not None:
        parameters["ExternalId"] = receiver.external_id
    credentials = session.client("sts", config=config).assume_role(**parameters)["Credentials"]
    return session.client(
        service,
        config=config,
        aws_access_key_id=credentials["AccessKeyId"],
        aws_secret_access_key=credentials["SecretAccessKey"],
        aws_session_token=credentials["SessionToken"],
    )


MOST_SUBJECT = 99
MOST_SMS = 160
"""Characters of one SMS in the GSM alphabet; only its ASCII characters are used."""

_LEAST_TITLE = 40
"""Characters of a title that must fit into an SMS beside the link; otherwise the link is left out."""

_TOPIC = rf"^{ARN_PARTITION}:sns:[a-z0-9-]+:[0-9]{{12}}:[A-Za-z0-9_-]+(\.fifo)?$"
_DOUBLE = "[]{}\\^~|"
"""Characters that GSM encodes as two."""


class SnsReceiver(AwsReceiver):
    """Publishes to a topic, or sends an SMS."""

    kind: Literal["sns"]
    topic_arn: Annotated[str, StringConstraints(pattern=_TOPIC, max_length=400)] | None = None
    phone_number: Annotated[str, StringConstraints(pattern=r"^\+[1-9][0-9]{6,14}$")] | None = Field(
        None,
        description="With + and the country code; receives one SMS of the title, truncated to 160 characters, and the link if it fits.",
    )
    region: Annotated[str, StringConstraints(pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$")] | None = Field(
        None, description="Region for SMS; a topic's ARN contains its own."
    )
    content: Literal["text", "event"] = Field(
        "text", description="Message to a topic: the text for people, or the CloudEvent for programs."
    )

    @model_validator(mode="after")
    def _has_one_destination(self) -> SnsReceiver:
        if (self.topic_arn is None) == (self.phone_number is None):
            raise ValueError("give either 'topic_arn' or 'phone_number'")
        if (self.phone_number is None) != (self.region is None):
            raise ValueError("'region' is required with 'phone_number', and only allowed with it")
        return self


def send_to_sns(receiver: SnsReceiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Publish the message once."""
    region = receiver.region or region_of(receiver.topic_arn or "")
    parameters = (
        _sms(receiver, message)
        if receiver.topic_arn is None
        else _topic(receiver, receiver.topic_arn, message)
    )

    def publish(client: Any) -> AttemptResult:
        return AttemptResult("done", f"sns: message {client.publish(**parameters)['MessageId']}")

    return call_service(receiver, delivery, "sns", region, publish)


def sms(text: str, url: str = "") -> str:
    """A text as one SMS: ASCII without control characters, truncated to one SMS; followed by a link if enough of the text remains."""
    room = MOST_SMS - _length(url) - 1 if url and url.isascii() else 0
    if room >= _LEAST_TITLE:
        return f"{_short(text, room)} {url}"
    return _short(text, MOST_SMS)


def _short(text: str, most: int) -> str:
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    printable = "".join(character if character.isprintable() else " " for character in ascii_text)
    content = " ".join(printable.split()).replace("`", "'")
    if _length(content) <= most:
        return content
    while _length(content) > most - 3:
        content = content[:-1]
    return content + "..."


def attributes(notification: Notification) -> dict[str, dict[str, str]]:
    """Message attributes for filters of subscriptions."""
    first = notification.alerts[0]
    values = {
        "status": notification.status,
        "project": notification.project,
        "run": notification.run,
        "severity": first.severity,
        "rule": first.rule,
        "notification_id": notification.id,
    }
    return {name: {"DataType": "String", "StringValue": value} for name, value in values.items() if value}


def fifo(notification: Notification) -> dict[str, str]:
    """The order within a group of alerts, and an id by which AWS drops duplicates within five minutes."""
    return {
        "MessageGroupId": hashlib.sha256(notification.group_key.encode()).hexdigest(),
        "MessageDeduplicationId": hashlib.sha256(notification.id.encode()).hexdigest(),
    }


def _length(text: str) -> int:
    return len(text) + sum(text.count(character) for character in _DOUBLE)


def _sms(receiver: SnsReceiver, message: Message) -> dict[str, Any]:
    kind = {"AWS.SNS.SMS.SMSType": {"DataType": "String", "StringValue": "Transactional"}}
    return {
        "PhoneNumber": receiver.phone_number,
        "Message": sms(message.title, message.notification.url),
        "MessageAttributes": kind,
    }


def _topic(receiver: SnsReceiver, topic: str, message: Message) -> dict[str, Any]:
    notification = message.notification
    # A subject is ASCII and begins with a letter, a digit or a punctuation mark.
    subject = unicodedata.normalize("NFKD", message.title).encode("ascii", "ignore").decode()
    text = within(message.event, MOST_BYTES).decode() if receiver.content == "event" else message.text
    return {
        "TopicArn": topic,
        "Subject": " ".join(subject.split())[:MOST_SUBJECT] or "Watchstep",
        "Message": text or message.title,
        "MessageAttributes": attributes(notification),
        **(fifo(notification) if topic.endswith(".fifo") else {}),
    }


_QUEUE = rf"^{ARN_PARTITION}:sqs:[a-z0-9-]+:[0-9]{{12}}:[A-Za-z0-9_-]+(\.fifo)?$"


class SqsReceiver(AwsReceiver):
    """Sends to a queue."""

    kind: Literal["sqs"]
    queue_arn: Annotated[str, StringConstraints(pattern=_QUEUE, max_length=300)] = Field(
        description="ARN of the queue; its URL is looked up, so that no other address can be named."
    )


def send_to_sqs(receiver: SqsReceiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Send the event once."""
    notification = message.notification
    account, name = receiver.queue_arn.split(":")[4:6]
    parameters = {
        "MessageBody": within(message.event, MOST_BYTES).decode(),
        "MessageAttributes": attributes(notification),
        **(fifo(notification) if name.endswith(".fifo") else {}),
    }

    def put(client: Any) -> AttemptResult:
        url = client.get_queue_url(QueueName=name, QueueOwnerAWSAccountId=account)["QueueUrl"]
        return AttemptResult(
            "done", f"sqs: message {client.send_message(QueueUrl=url, **parameters)['MessageId']}"
        )

    return call_service(receiver, delivery, "sqs", region_of(receiver.queue_arn), put)


SOURCE = "watchstep"
_BUS = rf"^{ARN_PARTITION}:events:[a-z0-9-]+:[0-9]{{12}}:event-bus/[A-Za-z0-9_./-]+$"
_BATCH = 10
_FRAME = 1000
_NANOSECONDS = 1_000_000_000


class EventBridgeReceiver(AwsReceiver):
    """Puts events on a bus."""

    kind: Literal["eventbridge"]
    bus_arn: Annotated[str, StringConstraints(pattern=_BUS, max_length=400)] = Field(
        description="ARN of the event bus."
    )


def send_to_eventbridge(
    receiver: EventBridgeReceiver, message: Message, delivery: DeliveryContext
) -> AttemptResult:
    """Put the events once, and once more those that failed with a transient error.

    If some are still not accepted, all are sent again at the next try; each has an ``id`` in its detail.
    """

    def put(client: Any) -> AttemptResult:
        waiting = entries(receiver, message.notification)
        refused = _put(client, waiting)
        if refused and all(is_transient(code) for _, code in refused):
            refused = _put(client, [entry for entry, _ in refused])
        return _result(len(waiting), [code for _, code in refused])

    return call_service(receiver, delivery, "events", region_of(receiver.bus_arn), put)


def entries(receiver: EventBridgeReceiver, notification: Notification) -> list[dict[str, Any]]:
    """An entry for each alert, within the size limit."""
    shared = {key: value for key, value in notification.as_data().items() if key != "alerts"}
    event_entries = []
    for alert in notification.as_data()["alerts"]:
        detail = {
            **shared,
            "notification": notification.id,
            "id": f"{notification.id}/{alert['fingerprint']}",
        }
        text = _encode({**detail, "alert": alert})
        if len(text.encode()) > MOST_BYTES - _FRAME:
            text = _encode(
                {**detail, "alert": {**alert, "explanation": None, "message": alert["message"][:1000]}}
            )
        event_entries.append(
            {
                "Source": SOURCE,
                "DetailType": f"io.watchstep.alert.{alert['phase']}",
                "Detail": text,
                "EventBusName": receiver.bus_arn,
                "Resources": [notification.source[:2048]],
                "Time": datetime.fromtimestamp(notification.at_ns // _NANOSECONDS, timezone.utc),
            }
        )
    return event_entries


def _put(client: Any, waiting: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Put entries; return those that were refused, each with the error code."""
    refused = []
    for batch in _batches(waiting):
        response = client.put_events(Entries=batch)
        for entry, status in zip(batch, response["Entries"], strict=True):
            if status.get("ErrorCode"):
                refused.append((entry, str(status["ErrorCode"])))
    return refused


def _batches(waiting: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    for entry in waiting:
        more = len(entry["Detail"].encode()) + _FRAME
        if batch and (len(batch) == _BATCH or size + more > MOST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += more
    if batch:
        yield batch


def _result(sent: int, codes: list[str]) -> AttemptResult:
    if not codes:
        return AttemptResult("done", f"events: {sent} accepted")
    detail = f"events: {len(codes)} of {sent} not accepted: {', '.join(sorted(set(codes)))}"
    if any(is_transient(code) for code in codes):
        return AttemptResult("error", detail)
    return AttemptResult("failed", f"{detail}; AWS refused them, so they are not sent again")


def _encode(detail: dict[str, Any]) -> str:
    return json.dumps(detail, separators=(",", ":"))
