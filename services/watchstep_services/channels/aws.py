"""Receivers of AWS: SNS topics and phone numbers, SQS queues, EventBridge buses."""

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
"""Of a message to SNS, SQS or EventBridge, attributes and all; AWS takes 262,144."""

ARN_PARTITION = r"arn:aws(?:-cn|-us-gov)?"
_SESSION = "watchstep-receivers"
_ROLE_SECONDS = 900

_PASSING = re.compile(
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
    """What receivers in AWS share. They act with the service's rights, so that only admins write them."""

    administered = True

    role_arn: RoleArn | None = Field(
        None, description="Assumed for each message; else the service's own credentials."
    )
    external_id: Annotated[str, StringConstraints(min_length=2, max_length=1224)] | None = Field(
        None, description="Asked for by the role's trust policy."
    )


def region_of(arn: str) -> str:
    """The region that an ARN names."""
    return arn.split(":")[3]


def attempt(
    receiver: AwsReceiver,
    delivery: DeliveryContext,
    service: str,
    region: str,
    call: Callable[[Any], AttemptResult],
) -> AttemptResult:
    """Make a client and call it.

    Args:
        receiver: whose role.
        delivery: the way out.
        service: boto3's name of it.
        region: of the receiver.
        call: what to do with the client.

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
    """What an error that AWS answered means."""
    error = response.get("Error", {})
    code, words = str(error.get("Code", "")), str(error.get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{service}: {code}: {' '.join(words.split())[:300]}"
    if status >= 500 or status == 429 or passes(code):
        return AttemptResult("error", said)
    return AttemptResult("failed", f"{said}; AWS refuses it, so it is not sent again")


def passes(code: str) -> bool:
    """Whether an error by its code may pass by itself."""
    return _PASSING.search(code) is not None


def _client(receiver: AwsReceiver, delivery: DeliveryContext, service: str, region: str) -> Any:
    import boto3
    from botocore.config import Config

    # One try: the outbox tries again, and each call has its part of the time.
    seconds = max(1.0, delivery.seconds / 3)
    config = Config(
        connect_timeout=seconds, read_timeout=seconds, retries={"mode": "standard", "total_max_attempts": 1}
    )
    session = boto3.session.Session(region_name=region)
    if receiver.role_arn is None:
        return session.client(service, config=config)
    asked = {"RoleArn": receiver.role_arn, "RoleSessionName": _SESSION, "DurationSeconds": _ROLE_SECONDS}
    if receiver.external_id is not None:
        asked["ExternalId"] = receiver.external_id
    given = session.client("sts", config=config).assume_role(**asked)["Credentials"]
    return session.client(
        service,
        config=config,
        aws_access_key_id=given["AccessKeyId"],
        aws_secret_access_key=given["SecretAccessKey"],
        aws_session_token=given["SessionToken"],
    )


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


def send_to_sns(receiver: SnsReceiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Publish once."""
    region = receiver.region or region_of(receiver.topic_arn or "")
    asked = (
        _sms(receiver, message)
        if receiver.topic_arn is None
        else _topic(receiver, receiver.topic_arn, message)
    )

    def publish(client: Any) -> AttemptResult:
        return AttemptResult("done", f"sns: message {client.publish(**asked)['MessageId']}")

    return attempt(receiver, delivery, "sns", region, publish)


def sms(text: str) -> str:
    """A text as one SMS: in ASCII without control characters, cut where one SMS ends."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    words = " ".join("".join(message if message.isprintable() else " " for message in plain).split()).replace(
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
    return len(text) + sum(text.count(message) for message in _DOUBLE)


def _sms(receiver: SnsReceiver, message: Message) -> dict[str, Any]:
    kind = {"AWS.SNS.SMS.SMSType": {"DataType": "String", "StringValue": "Transactional"}}
    return {"PhoneNumber": receiver.phone_number, "Message": sms(message.title), "MessageAttributes": kind}


def _topic(receiver: SnsReceiver, topic: str, message: Message) -> dict[str, Any]:
    told = message.notification
    # A subject is ASCII and begins with a letter, a digit or a mark.
    subject = unicodedata.normalize("NFKD", message.title).encode("ascii", "ignore").decode()
    text = within(message.event, MOST_BYTES).decode() if receiver.content == "event" else message.text
    return {
        "TopicArn": topic,
        "Subject": " ".join(subject.split())[:MOST_SUBJECT] or "Watchstep",
        "Message": text or message.title,
        "MessageAttributes": attributes(told),
        **(fifo(told) if topic.endswith(".fifo") else {}),
    }


_QUEUE = rf"^{ARN_PARTITION}:sqs:[a-z0-9-]+:[0-9]{{12}}:[A-Za-z0-9_-]+(\.fifo)?$"


class SqsReceiver(AwsReceiver):
    """Sends to a queue."""

    kind: Literal["sqs"]
    queue_arn: Annotated[str, StringConstraints(pattern=_QUEUE, max_length=300)] = Field(
        description="Of the queue; its URL is asked for, so that no address can be named."
    )


def send_to_sqs(receiver: SqsReceiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Send the event once."""
    told = message.notification
    account, name = receiver.queue_arn.split(":")[4:6]
    asked = {
        "MessageBody": within(message.event, MOST_BYTES).decode(),
        "MessageAttributes": attributes(told),
        **(fifo(told) if name.endswith(".fifo") else {}),
    }

    def put(client: Any) -> AttemptResult:
        url = client.get_queue_url(QueueName=name, QueueOwnerAWSAccountId=account)["QueueUrl"]
        return AttemptResult(
            "done", f"sqs: message {client.send_message(QueueUrl=url, **asked)['MessageId']}"
        )

    return attempt(receiver, delivery, "sqs", region_of(receiver.queue_arn), put)


SOURCE = "watchstep"
_BUS = rf"^{ARN_PARTITION}:events:[a-z0-9-]+:[0-9]{{12}}:event-bus/[A-Za-z0-9_./-]+$"
_BATCH = 10
_FRAME = 1000
_NANOSECONDS = 1_000_000_000


class EventBridgeReceiver(AwsReceiver):
    """Puts events on a bus."""

    kind: Literal["eventbridge"]
    bus_arn: Annotated[str, StringConstraints(pattern=_BUS, max_length=400)] = Field(
        description="Of the event bus."
    )


def send_to_eventbridge(
    receiver: EventBridgeReceiver, message: Message, delivery: DeliveryContext
) -> AttemptResult:
    """Put the events once, those that a bus takes no notice of at first once more.

    Where some are not taken, all are sent again at the next try: each has an ``id`` in its detail.
    """

    def put(client: Any) -> AttemptResult:
        waiting = entries(receiver, message.notification)
        refused = _put(client, waiting)
        if refused and all(passes(code) for _, code in refused):
            refused = _put(client, [entry for entry, _ in refused])
        return _told(len(waiting), [code for _, code in refused])

    return attempt(receiver, delivery, "events", region_of(receiver.bus_arn), put)


def entries(receiver: EventBridgeReceiver, notification: Notification) -> list[dict[str, Any]]:
    """An entry for each alert, small enough to be taken."""
    shared = {key: value for key, value in notification.as_data().items() if key != "alerts"}
    made = []
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
        made.append(
            {
                "Source": SOURCE,
                "DetailType": f"watchstep.alert.{alert['phase']}",
                "Detail": text,
                "EventBusName": receiver.bus_arn,
                "Resources": [notification.run_url[:2048]],
                "Time": datetime.fromtimestamp(notification.at_ns // _NANOSECONDS, timezone.utc),
            }
        )
    return made


def _put(client: Any, waiting: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Those that were not taken, each with the reason's code."""
    refused = []
    for batch in _batches(waiting):
        answer = client.put_events(Entries=batch)
        for entry, said in zip(batch, answer["Entries"], strict=True):
            if said.get("ErrorCode"):
                refused.append((entry, str(said["ErrorCode"])))
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


def _told(sent: int, codes: list[str]) -> AttemptResult:
    if not codes:
        return AttemptResult("done", f"events: {sent} taken")
    said = f"events: {len(codes)} of {sent} not taken: {', '.join(sorted(set(codes)))}"
    if any(passes(code) for code in codes):
        return AttemptResult("error", said)
    return AttemptResult("failed", f"{said}; AWS refuses them, so they are not sent again")


def _encode(detail: dict[str, Any]) -> str:
    return json.dumps(detail, separators=(",", ":"))
