"""Amazon EventBridge: one event for each alert, so that patterns can look at its severity and labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from watchstep_services.channels.aws import (
    ARN_PARTITION,
    MOST_BYTES,
    AwsReceiver,
    attempt,
    passes,
    region_of,
)
from watchstep_services.channels.notification import Notification
from watchstep_services.channels.outside import DeliveryContext, Message
from watchstep_services.core.due_action import AttemptResult

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


def send(receiver: EventBridgeReceiver, letter: Message, outside: DeliveryContext) -> AttemptResult:
    """Put the events once, those that a bus takes no notice of at first once more.

    Where some are not taken, all are sent again at the next try: each has an ``id`` in its detail.
    """

    def put(client: Any) -> AttemptResult:
        waiting = entries(receiver, letter.notification)
        refused = _put(client, waiting)
        if refused and all(passes(code) for _, code in refused):
            refused = _put(client, [entry for entry, _ in refused])
        return _told(len(waiting), [code for _, code in refused])

    return attempt(receiver, outside, "events", region_of(receiver.bus_arn), put)


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
