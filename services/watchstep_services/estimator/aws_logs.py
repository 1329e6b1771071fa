"""Output that lies in CloudWatch Logs, read stream by stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from watchstep_services.estimator.aws import Aws, RefusedError
from watchstep_services.estimator.backend import LogPart
from watchstep_services.estimator.log_file import LARGEST_PART

_SECONDS = 15.0


class _Place(NamedTuple):
    """Where reading of a stream goes on: CloudWatch's token, and the time in milliseconds of the last that was read."""

    token: str
    written: int


def streams_below(aws: Aws, region: str, group: str, prefix: str) -> list[str]:
    """The streams of a group whose names begin so; none where the group is not there yet."""
    found: list[str] = []
    asked: dict[str, Any] = {}
    while True:
        try:
            page = aws.call(
                "logs", "describe_log_streams", region=region, logGroupName=group, logStreamNamePrefix=prefix, **asked
            )  # fmt: skip
        except RefusedError as error:
            if error.means_missing:
                return found
            raise
        found += [str(stream["logStreamName"]) for stream in page.get("logStreams", [])]
        if not page.get("nextToken"):
            return sorted(found)
        asked = {"nextToken": str(page["nextToken"])}


def read_streams(
    aws: Aws,
    region: str,
    group: str,
    streams: Iterable[str],
    cursor: str,
    label: Callable[[str], str] = lambda _: "",
) -> LogPart:
    """What streams hold beyond a place: one after another, a megabyte at most, each line ended by a newline.

    Args:
        aws: calls it.
        region: of the group.
        group: of the streams.
        streams: their names.
        cursor: where the last part ended.
        label: what stands before each line of a stream.
    """
    places, data = _places(cursor), bytearray()
    deadline = time.monotonic() + _SECONDS
    for stream in streams:
        before = label(stream)
        for message in _messages(aws, region, group, stream, places):
            data += "".join(f"{before}{line}\n" for line in message.split("\n")).encode()
        if len(data) >= LARGEST_PART or time.monotonic() >= deadline:
            break
    return LogPart(bytes(data), json.dumps(places) if places else cursor)


def _messages(aws: Aws, region: str, group: str, stream: str, places: dict[str, _Place]) -> Iterator[str]:
    """Messages beyond a stream's place, which is moved on with each page."""
    size = 0
    deadline = time.monotonic() + _SECONDS
    while size < LARGEST_PART and time.monotonic() < deadline:
        try:
            page = _page(aws, region, group, stream, places.get(stream))
        except RefusedError as error:
            if error.means_missing:
                return
            raise
        before, token = places.get(stream), str(page["nextForwardToken"])
        if (
            before is not None and token == before.token
        ):  # CloudWatch's sign for the end; no empty page is one
            return
        written = [event.get("timestamp", 0) for event in page["events"]]
        places[stream] = _Place(token, max(written, default=0 if before is None else before.written))
        for event in page["events"]:
            size += len(event["message"])
            yield str(event["message"])


def _page(aws: Aws, region: str, group: str, stream: str, place: _Place | None) -> dict[str, Any]:
    asked: dict[str, Any] = {"logGroupName": group, "logStreamName": stream, "startFromHead": True}
    if place is None:
        return aws.call("logs", "get_log_events", region=region, **asked)
    try:
        return aws.call("logs", "get_log_events", region=region, **asked, nextToken=place.token)
    except RefusedError as error:
        if not error.code.startswith("InvalidParameter"):
            raise
        # Tokens are good for a day.
        return aws.call("logs", "get_log_events", region=region, **asked, startTime=place.written + 1)


def _places(cursor: str) -> dict[str, _Place]:
    try:
        held = json.loads(cursor) if cursor else {}
        return {str(name): _Place(str(token), int(written)) for name, (token, written) in held.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
