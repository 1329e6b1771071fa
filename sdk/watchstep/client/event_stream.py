"""Events as they come, over connections that break: each is given once, in order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPResponse
from typing import Any

from watchstep.client.documents import Event, read
from watchstep.client.transport import RefusedError, Transport
from watchstep.errors import ServiceError

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
_MAX_LINE = 8 * 1024 * 1024
_LASTING = frozenset((429, 500, 502, 503, 504))


def follow(transport: Transport, path: str, query: Mapping[str, Any], after: int | None) -> Iterator[Event]:
    """Events of a stream, for as long as they are asked for; a broken connection is made again where it broke.

    Args:
        transport: to the service.
        path: of the stream.
        query: what to follow.
        after: the place of the last event that was seen; None for now.

    Raises:
        RefusedError: the service refuses for good.
    """
    pause = _FIRST_PAUSE
    while True:
        headers = {"Accept": "text/event-stream"} | ({} if after is None else {"Last-Event-ID": str(after)})
        try:
            with transport.open("GET", path, query, headers=headers) as answer:
                for place, event in _messages(answer):
                    after, pause = place, _FIRST_PAUSE
                    if event is not None:
                        yield event
        except RefusedError as error:
            if error.status not in _LASTING:
                raise
        except ServiceError:
            pass  # it is made again, from the last place
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE, 2 * pause)


def _messages(answer: HTTPResponse) -> Iterator[tuple[int, Event | None]]:
    """Places, and the events at them; the connection's end ends it, and what was not whole is left out."""
    held: dict[str, str] = {}
    while line := answer.readline(_MAX_LINE):
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if text:
            name, _, value = text.partition(":")
            held[name] = value.removeprefix(" ")
            continue
        if "id" in held and line.endswith(b"\n"):
            place = int(held["id"])
            yield place, _event(held["data"], place) if "data" in held else None
        held = {}


def _event(text: str, place: int) -> Event:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ServiceError(f"an event is no JSON ({error})", "see that nothing stands between") from error
    return read(Event, data, place=place)
