"""Send a notification to a receiver: for the outbox, and for those who try a receiver out."""

from __future__ import annotations

from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep_services.channels import kinds
from watchstep_services.channels.notification import Notification, as_cloud_event
from watchstep_services.channels.outside import DeliveryContext, Message
from watchstep_services.channels.receiver import Receiver
from watchstep_services.channels.wording import Templates, word
from watchstep_services.core.due_action import AttemptResult, DueAction
from watchstep_services.core.egress import AddressRefusedError
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import RunRow
from watchstep_services.notify.directory import find_receiver, open_secrets, reach_of
from watchstep_services.service.context import Service

NOTIFY = "notify"
"""Kind of an action; its payload is ``{"receiver": name, "notification": Notification.as_data()}``."""


def try_notify(service: Service, due: DueAction) -> AttemptResult:
    """Send a notification once. The receiver is looked up in the project of the action's run, as it is now."""
    notification = Notification.from_data(due.payload["notification"])
    name = str(due.payload["receiver"])
    try:
        with service.database.read() as session:
            project = session.get_one(RunRow, due.run_id).project
            receiver = find_receiver(service, session, project, name)
            outside = outside_of(service, session, project, receiver)
    except NotFoundError as error:
        return AttemptResult("failed", f"{error.what}; it was there when the alert was routed")
    return deliver(receiver, notification, outside)


def outside_of(service: Service, session: Session, project: str, receiver: Receiver) -> DeliveryContext:
    """The way out for a receiver, with its secrets opened.

    Raises:
        ConfigError: a secret cannot be read or opened.
    """
    return DeliveryContext(
        reach=reach_of(service.settings, project),
        seconds=service.settings.webhook_seconds,
        now_ns=read_clock(session),
        secrets=open_secrets(service, session, project, receiver),
    )


def deliver(receiver: Receiver, notification: Notification, outside: DeliveryContext) -> AttemptResult:
    """Put a notification into the receiver's words and send it, once.

    Raises:
        WatchstepError: what the receiver's owner can correct.
    """
    try:
        return kinds.send(receiver, message_of(notification, receiver.templates), outside)
    except AddressRefusedError as error:
        return AttemptResult("failed", f"{error.what} ({error.hint})")


def message_of(notification: Notification, templates: Templates) -> Message:
    """A notification in words."""
    title, text = word(notification, templates)
    return Message(
        notification=notification,
        title=title,
        text=text,
        worded=templates != Templates(),
        event=as_cloud_event(notification, title, text),
    )
