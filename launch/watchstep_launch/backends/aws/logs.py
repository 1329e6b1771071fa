"""Output that lies in CloudWatch Logs, read stream by stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from watchstep_launch.backend import LogPart
from watchstep_launch.backends.aws.calls import Aws, AwsCallError
from watchstep_launch.backends.log_file import LARGEST_PART

_SECONDS = 15.0


class _Place(NamedTuple):
    """Where reading of a stream goes on.

    Attributes:
        token: CloudWatch's. It is good for a day.
        written: when the last line that was read was written, in milliseconds.
        since: what the token's pages begin at, in the same; 0 for the stream's beginning.
    """

    token: str
    written: int
    since: int


def streams_below(aws: Aws, region: str, group: str, prefix: str) -> list[str]:
    """The streams of a group whose names begin so; none where the group is not there yet."""
    found: list[str] = []
    asked: dict[str, Any] = {}
    while True:
        try:
            page = aws.call(
                "logs", "describe_log_streams", region=region, logGroupName=group, logStreamNamePrefix=prefix, **asked
            )  # fmt: skip
        except AwsCallError as error:
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
        place = places.get(stream)
        try:
            page, since = _page(aws, region, group, stream, place)
        except AwsCallError as error:
            if error.means_missing:
                return
            raise
        token = str(page["nextForwardToken"])
        if place is not None and token == place.token:  # CloudWatch's sign for the end; no empty page is one
            return
        written = max(
            (event.get("timestamp", 0) for event in page["events"]), default=place.written if place else 0
        )
        places[stream] = _Place(token, written, since)
        for event in page["events"]:
            size += len(event["message"])
            yield str(event["message"])


def _page(aws: Aws, region: str, group: str, stream: str, place: _Place | None) -> tuple[dict[str, Any], int]:
    """A page, and what it and those behind it begin at."""
    asked: dict[str, Any] = {"logGroupName": group, "logStreamName": stream, "startFromHead": True}
    if place is None:
        return aws.call("logs", "get_log_events", region=region, **asked), 0
    since: dict[str, Any] = {"startTime": place.since} if place.since else {}
    try:
        page = aws.call("logs", "get_log_events", region=region, **asked, **since, nextToken=place.token)
    except AwsCallError as error:
        if not error.code.startswith("InvalidParameter"):
            raise
        begun = place.written + 1  # the token is too old
        return aws.call("logs", "get_log_events", region=region, **asked, startTime=begun), begun
    return page, place.since


def _places(cursor: str) -> dict[str, _Place]:
    try:
        held = json.loads(cursor) if cursor else {}
        return {str(name): _Place(str(one[0]), int(one[1]), int(one[2])) for name, one in held.items()}
    except (ValueError, TypeError, AttributeError, IndexError):
        return {}
