"""Amazon SQS: the CloudEvent as a message of a queue, standard or FIFO."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from watchstep_services.channels.aws import (
    ARN_PARTITION,
    MOST_BYTES,
    AwsReceiver,
    attempt,
    region_of,
)
from watchstep_services.channels.notification import within
from watchstep_services.channels.outside import DeliveryContext, Message
from watchstep_services.channels.sns import attributes, fifo
from watchstep_services.core.due_action import AttemptResult

_QUEUE = rf"^{ARN_PARTITION}:sqs:[a-z0-9-]+:[0-9]{{12}}:[A-Za-z0-9_-]+(\.fifo)?$"


class SqsReceiver(AwsReceiver):
    """Sends to a queue."""

    kind: Literal["sqs"]
    queue_arn: Annotated[str, StringConstraints(pattern=_QUEUE, max_length=300)] = Field(
        description="Of the queue; its URL is asked for, so that no address can be named."
    )


def send(receiver: SqsReceiver, letter: Message, outside: DeliveryContext) -> AttemptResult:
    """Send the event once."""
    told = letter.notification
    account, name = receiver.queue_arn.split(":")[4:6]
    asked = {
        "MessageBody": within(letter.event, MOST_BYTES).decode(),
        "MessageAttributes": attributes(told),
        **(fifo(told) if name.endswith(".fifo") else {}),
    }

    def put(client: Any) -> AttemptResult:
        url = client.get_queue_url(QueueName=name, QueueOwnerAWSAccountId=account)["QueueUrl"]
        return AttemptResult(
            "done", f"sqs: message {client.send_message(QueueUrl=url, **asked)['MessageId']}"
        )

    return attempt(receiver, outside, "sqs", region_of(receiver.queue_arn), put)
