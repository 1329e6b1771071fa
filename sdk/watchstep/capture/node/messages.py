"""What ranks of a node say to each other, and its form on the wire: a length, JSON, a length, bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from watchstep.capture.upload.outgoing import Blocks, Notice, Outgoing, SegmentPlace
from watchstep.errors import FormatError
from watchstep.format import segment
from watchstep.format.layout import SegmentKey, WriterId, check_name

VERSION = 1
_LENGTHS = struct.Struct("!II")
_MAX_HEADER = 4 * 1024 * 1024


@dataclass(frozen=True)
class Hello:
    """A rank begins to hand over: the first word on a connection."""

    token: str
    version: int = VERSION


@dataclass(frozen=True)
class Welcome:
    """The leader is ready: the node's writer, its next number, the term, what is just being made."""

    writer: WriterId
    seq: int
    term: str
    notice: Notice | None


@dataclass(frozen=True)
class Give:
    """The leader is about to write: send what is there, then `BatchEnd`."""


@dataclass(frozen=True)
class BatchEnd:
    """That was all for now; ``urgent`` asks the leader to write at once, ``more`` to ask again."""

    urgent: bool = False
    more: bool = False


@dataclass(frozen=True)
class Handed:
    """A block."""

    item: Outgoing


@dataclass(frozen=True)
class ObjectStarted:
    """An object is about to be made."""

    notice: Notice


@dataclass(frozen=True)
class ObjectStored:
    """An object lies on the store with these blocks."""

    key: SegmentKey
    blocks: Blocks


@dataclass(frozen=True)
class Term:
    """A rank has left, and a new term begun."""

    term: str


@dataclass(frozen=True)
class Control:
    """The run's control document."""

    document: bytes


@dataclass(frozen=True)
class Apart:
    """Each rank shall write for itself, for good."""

    reason: str


Message = Hello | Welcome | Give | BatchEnd | Handed | ObjectStarted | ObjectStored | Term | Control | Apart


def encode(message: Message) -> bytes:
    """A message as it is sent."""
    payload = b""
    if isinstance(message, Handed):
        fields: Any = message.item.place.name
        payload = message.item.data
    elif isinstance(message, Control):
        fields, payload = None, message.document
    elif isinstance(message, Welcome):
        notice = _notice_as_data(message.notice) if message.notice else None
        fields = [_writer_as_data(message.writer), message.seq, message.term, notice]
    elif isinstance(message, ObjectStarted):
        fields = _notice_as_data(message.notice)
    elif isinstance(message, ObjectStored):
        fields = [message.key.path, message.blocks]
    else:
        fields = vars(message)
    header = json.dumps([type(message).__name__, fields]).encode()
    return b"".join((_LENGTHS.pack(len(header), len(payload)), header, payload))


def read(receive: Callable[[int], bytes]) -> Message:
    """The next message.

    Args:
        receive: gives exactly so many bytes, or raises.

    Raises:
        FormatError: it is none, or over the limits.
    """
    header, payload = _LENGTHS.unpack(receive(_LENGTHS.size))
    if header > _MAX_HEADER or payload > segment.MAX_BYTES:
        raise FormatError(f"message of {header} and {payload} bytes, over the limit", _MEND)
    return _decode(receive(header), receive(payload))


_MEND = "use one version of watchstep for all ranks of a node"


def _decode(header: bytes, payload: bytes) -> Message:
    try:
        kind, fields = json.loads(header)
        return _KINDS[kind](fields, payload)
    except FormatError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"message {header[:80]!r}: of another form ({error})", _MEND) from error


def _handed(fields: Any, payload: bytes) -> Handed:
    place = SegmentPlace.parse(fields)
    if place is None or place.first > place.last:
        raise ValueError("no block's place")
    return Handed(Outgoing(place, payload))


def _welcome(fields: Any, _: bytes) -> Welcome:
    writer, seq, term, notice = fields
    return Welcome(_writer(writer), _whole(seq), str(term), _notice(notice) if notice else None)


def _writer(fields: Any) -> WriterId:
    attempt, node, writer = fields
    return WriterId(check_name("attempt", attempt), check_name("node", node), check_name("writer", writer))


def _notice(fields: Any) -> Notice:
    path, blocks, term = fields
    return Notice(SegmentKey.parse(path), _blocks(blocks), str(term))


def _blocks(fields: Any) -> Blocks:
    return {str(token): tuple(_whole(number) for number in numbers) for token, numbers in fields.items()}


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number from 0")
    return value


def _writer_as_data(writer: WriterId) -> list[str]:
    return [writer.attempt, writer.node, writer.writer]


def _notice_as_data(notice: Notice) -> list[Any]:
    return [notice.key.path, notice.blocks, notice.term]


_KINDS: dict[str, Callable[[Any, bytes], Message]] = {
    "Hello": lambda fields, _: Hello(str(fields["token"]), _whole(fields["version"])),
    "Welcome": _welcome,
    "Give": lambda *_: Give(),
    "BatchEnd": lambda fields, _: BatchEnd(bool(fields["urgent"]), bool(fields["more"])),
    "Handed": _handed,
    "ObjectStarted": lambda fields, _: ObjectStarted(_notice(fields)),
    "ObjectStored": lambda fields, _: ObjectStored(SegmentKey.parse(fields[0]), _blocks(fields[1])),
    "Term": lambda fields, _: Term(str(fields["term"])),
    "Control": lambda _, payload: Control(payload),
    "Apart": lambda fields, _: Apart(str(fields["reason"])[:500]),
}
