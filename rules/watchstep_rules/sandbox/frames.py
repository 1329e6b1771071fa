"""Messages between parent and child: a length, a JSON document, and bytes that it names. No pickle."""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Sequence
from typing import Any

MAX_ANSWER = 32 * 1024 * 1024
"""Longest document that a child may send."""

_HEAD = struct.Struct("<II")
_CHUNK = 1 << 20


class FrameError(Exception):
    """The other side is gone, too slow, or sends what is no message."""


def pack(document: Any, parts: Sequence[bytes] = ()) -> bytes:
    """One message."""
    head = json.dumps({"document": document, "parts": [len(part) for part in parts]}).encode()
    return b"".join([_HEAD.pack(len(head), len(parts)), head, *parts])


def kept(text: str) -> str:
    """A text of the other side, without what a database does not keep: halves of characters, and zeros."""
    return text.encode(errors="replace").decode().replace("\0", "\ufffd")


def read_blocking(descriptor: int) -> tuple[Any, list[bytes]]:
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


def receive(descriptor: int, deadline: float) -> Any:
    """The document of the child's next message; nothing that it sends is trusted.

    Raises:
        FrameError: it is gone, the deadline has come, or it is no such document.
    """
    length, parts = _HEAD.unpack(_received(descriptor, _HEAD.size, deadline))
    if length > MAX_ANSWER or parts:
        raise FrameError(f"sent a message of {length} bytes and {parts} parts, over the limit")
    data = _received(descriptor, length, deadline)
    try:
        return json.loads(data)["document"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameError("sent what is no message") from error


def _received(descriptor: int, size: int, deadline: float) -> bytes:
    held = bytearray()
    while len(held) < size:
        _wait(descriptor, select.POLLIN, deadline)
        try:
            part = os.read(descriptor, min(size - len(held), _CHUNK))
        except BlockingIOError:
            continue
        if not part:
            raise FrameError("ended")
        held += part
    return bytes(held)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise FrameError("took too long")


def _exactly(descriptor: int, size: int) -> bytes:
    held = bytearray()
    while len(held) < size:
        part = os.read(descriptor, min(size - len(held), _CHUNK))
        if not part:
            raise EOFError
        held += part
    return bytes(held)
