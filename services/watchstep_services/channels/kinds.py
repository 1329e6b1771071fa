"""The kinds of receivers: how each is configured and how messages are sent to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

from watchstep_services.channels import alertmanager, aws, mail, slack, webhook
from watchstep_services.channels.delivery import DeliveryContext, Message
from watchstep_services.channels.receiver import Receiver
from watchstep_services.core.due_action import AttemptResult

Sender = Callable[[Any, Message, DeliveryContext], AttemptResult]
"""Sends a message once.

It takes at most ``delivery.seconds`` in total. The result states whether it is tried again. If it raises an exception, it is tried
again.
"""

AnyReceiver = Annotated[
    webhook.WebhookReceiver
    | slack.SlackReceiver
    | mail.EmailReceiver
    | aws.SnsReceiver
    | aws.SqsReceiver
    | aws.EventBridgeReceiver
    | alertmanager.AlertmanagerReceiver,
    Field(discriminator="kind"),
]

RECEIVER: TypeAdapter[AnyReceiver] = TypeAdapter(AnyReceiver, config=ConfigDict(hide_input_in_errors=True))

_SENDERS: dict[type[Receiver], Sender] = {
    webhook.WebhookReceiver: webhook.send,
    slack.SlackReceiver: slack.send,
    mail.EmailReceiver: mail.send,
    aws.SnsReceiver: aws.send_to_sns,
    aws.SqsReceiver: aws.send_to_sqs,
    aws.EventBridgeReceiver: aws.send_to_eventbridge,
    alertmanager.AlertmanagerReceiver: alertmanager.send,
}

KINDS = tuple(_SENDERS)
"""All kinds of receivers."""


def send(receiver: Receiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Send a message to a receiver, once.

    Raises:
        WatchstepError: an error that the owner of the receiver can correct; it is tried again.
    """
    return _SENDERS[type(receiver)](receiver, message, delivery)
