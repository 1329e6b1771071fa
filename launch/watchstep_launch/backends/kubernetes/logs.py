"""What pods wrote, from a place on: the API can begin at a second, and stamps each line with its time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from watchstep_launch.backend import LogPart
from watchstep_launch.backends.kubernetes.errors import KubernetesRefusedError
from watchstep_launch.backends.kubernetes.states import container_of, has_started, in_order, is_live
from watchstep_launch.backends.log_file import LARGEST_PART

if TYPE_CHECKING:
    from watchstep_launch.backends.kubernetes.client import KubernetesClient

_STAMPED = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d) ?")
_NOTHING_KEPT = frozenset((400, 404))
"""The container has not begun, or the pod, or its output, is gone."""

Place = tuple[str, int]
"""Time of the last line that was given, and how many of that time were."""


def read_logs(client: KubernetesClient, pods: Sequence[dict[str, Any]], cursor: str) -> LogPart:
    """New lines of each pod, a megabyte or so at most, the pods in the order in which they were made.

    A line that is not ended is given once its pod has. A kubelet keeps what it has not rotated away: the rest is lost.
    """
    places = _places(cursor)
    data = b""
    for pod in in_order(pods):
        metadata = pod["metadata"]
        if not has_started(pod) or len(data) >= LARGEST_PART:
            continue
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/log"
        place = places.get(metadata["uid"], ("", 0))
        query = {"container": container_of(pod), "timestamps": "true"}
        if place[0]:
            query["sinceTime"] = place[0]
        try:
            with client.stream(path, **query) as pieces:
                part, place = _new_lines(pieces, place, LARGEST_PART - len(data), complete_only=is_live(pod))
        except KubernetesRefusedError as error:
            if error.code not in _NOTHING_KEPT:
                raise
            continue
        data += part
        if place[0]:
            places[metadata["uid"]] = place
    held = {str(pod["metadata"]["uid"]) for pod in pods}
    kept = {uid: place for uid, place in places.items() if uid in held}
    return LogPart(data, json.dumps(kept, separators=(",", ":")) if kept else cursor)


def _new_lines(
    pieces: Iterable[bytes], place: Place, largest: int, *, complete_only: bool
) -> tuple[bytes, Place]:
    """What comes behind a place. Lines of the same time are counted: two may have it."""
    skipping = place[1]
    time = place[0]
    data = bytearray()
    for line in _lines(pieces):
        text = line
        if stamp := _STAMPED.match(line):  # without one it is the rest of a line that the kubelet cut
            text, time = line[stamp.end() :], stamp[0].decode().strip()
        if _key(time) < _key(place[0]):
            continue
        if time == place[0] and skipping:
            skipping -= 1
            continue
        if complete_only and not line.endswith(b"\n"):
            break
        data += text
        place = (time, place[1] + 1 if time == place[0] else 1)
        if len(data) >= largest:
            break
    return bytes(data), place


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest


def _key(time: str) -> tuple[str, str]:
    """Orders times of one zone: fractions have as many digits as they need."""
    stamp = _STAMPED.match(time.encode())
    if stamp is None:
        return "", ""
    return stamp[1].decode(), (stamp[2] or b"").decode()


def _places(cursor: str) -> dict[str, Place]:
    try:
        return {
            str(uid): (str(time), int(count)) for uid, (time, count) in json.loads(cursor or "{}").items()
        }
    except (ValueError, TypeError, AttributeError):
        return {}
