"""Events as they come, over connections that break: each is given once, in order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from watchstep.client.documents import Event, read
from watchstep.errors import ServiceError
from watchstep.platform.transport import ServiceRefusedError, Transport, pause_seconds

_MOST_AT_ONCE = 64 * 1024
_MAX_LINE = 8 * 1024 * 1024
_LASTING = frozenset((429, 500, 502, 503, 504))

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse


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
    failures = 0
    while True:
        after_seconds = None
        headers = {"Accept": "text/event-stream"} | ({} if after is None else {"Last-Event-ID": str(after)})
        try:
            with transport.open("GET", path, query, headers=headers) as answer:
                for place, event in _messages(answer):
                    after, failures = place, 0
                    if event is not None:
                        yield event
        except ServiceRefusedError as error:
            if error.status not in _LASTING:
                raise
            after_seconds = error.after_seconds
        except ServiceError:
            pass  # it is made again, from the last place
        failures += 1
        time.sleep(pause_seconds(failures, after_seconds))


def _lines(answer: BaseHTTPResponse) -> Iterator[bytes]:
    """The lines of an answer as they come, each with its end but for the last.

    Raises:
        ServiceError: a line is too long.
    """
    rest = b""
    while data := answer.read1(_MOST_AT_ONCE):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line + b"\n"
        if len(rest) > _MAX_LINE:
            raise ServiceError(f"an event is over {_MAX_LINE} bytes", "see that nothing stands between")
    if rest:
        yield rest


def _messages(answer: BaseHTTPResponse) -> Iterator[tuple[int, Event | None]]:
    """Places, and the events at them; the connection's end ends it, and what was not whole is left out."""
    held: dict[str, str] = {}
    for line in _lines(answer):
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
    except (ValueError, RecursionError) as error:
        raise ServiceError(f"an event is no JSON ({error})", "see that nothing stands between") from error
    return read(Event, data, place=place)
