"""Messages between parent and child: two lengths, a JSON document, and bytes. No pickle.

The child's messages are not trusted: the parent compares both lengths with its limits before it reads anything, so that
a long message costs it no memory.
"""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_HEAD = struct.Struct("<IQ")
_CHUNK = 1 << 20
_MEGABYTE = 1 << 20

Parts = Sequence[bytes | memoryview]


class FrameError(Exception):
    """The other side is gone, too slow, or sends an invalid message."""


@dataclass(frozen=True)
class FrameLimits:
    """The longest message that a parent reads.

    Attributes:
        document: bytes of the JSON document. Parsing takes up to 25 times as much memory.
        payload: bytes that follow it.
    """

    document: int
    payload: int = 0


SHORT = FrameLimits(_MEGABYTE + _MEGABYTE // 16)
"""A rule's state of at most 1 MiB, and what belongs to it."""


@dataclass(frozen=True)
class Reply:
    """A child's message.

    Attributes:
        document: what its JSON says.
        payload: the bytes that followed.
    """

    document: Any
    payload: bytearray


def pack(document: Any, parts: Parts = ()) -> bytes:
    """One message."""
    head = json.dumps({"document": document, "parts": [len(part) for part in parts]}).encode()
    return b"".join([_HEAD.pack(len(head), sum(map(len, parts))), head, *parts])


def kept(text: str) -> str:
    """A text of the other side, without what a database does not keep: halves of characters, and zeros."""
    return text.encode(errors="replace").decode().replace("\0", "\ufffd")


def read_blocking(descriptor: int) -> tuple[Any, list[bytearray]]:
    """The child's way to read a message.

    Raises:
        EOFError: the parent is gone.
    """
    length, _ = _HEAD.unpack(_exactly(descriptor, _HEAD.size))
    head = json.loads(_exactly(descriptor, length))
    return head["document"], [_exactly(descriptor, size) for size in head["parts"]]


def write_blocking(descriptor: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def send(descriptor: int, data: bytes, deadline: float) -> None:
    """The parent's way to write: it does not wait for a child that does not read.

    Args:
        descriptor: not blocking.
        data: what `pack` gave.
        deadline: by `time.monotonic`.

    Raises:
        FrameError: the child is gone, or the deadline has come.
    """
    view = memoryview(data)
    while view:
        _wait(descriptor, select.POLLOUT, deadline)
        try:
            view = view[os.write(descriptor, view[:_CHUNK]) :]
        except BlockingIOError:
            continue
        except OSError as error:
            raise FrameError("ended") from error


def receive(descriptor: int, deadline: float, bounds: FrameLimits) -> Reply:
    """The child's next message.

    Raises:
        FrameError: the child is gone, the deadline has come, or the message is invalid or over the bounds.
    """
    length, size = _HEAD.unpack(_received(descriptor, _HEAD.size, deadline))
    if length > bounds.document or size > bounds.payload:
        raise FrameError(f"sent a message of {length} and {size} bytes, over the limit")
    data = _received(descriptor, length, deadline)
    try:
        document = json.loads(data)["document"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameError("sent an invalid message") from error
    return Reply(document, _received(descriptor, size, deadline))


def _received(descriptor: int, size: int, deadline: float) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        _wait(descriptor, select.POLLIN, deadline)
        try:
            count = os.readv(descriptor, [view[:_CHUNK]])
        except BlockingIOError:
            continue
        if not count:
            raise FrameError("ended")
        view = view[count:]
    return data


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise FrameError("took too long")


def _exactly(descriptor: int, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = os.readv(descriptor, [view[:_CHUNK]])
        if not count:
            raise EOFError
        view = view[count:]
    return data
