"""The protocol between parent and child: frames, rows and findings.

A frame has two lengths, a JSON document and bytes; there is no pickle. Rows are Arrow IPC, findings have a typed binary form. The
parent does not trust the child: it compares both lengths with its limits before it reads anything, so a long message costs no memory.
Findings have a fixed number of bytes each and a text of bounded length, so a response costs the parent little more than its own size.
"""

from __future__ import annotations

import io
import json
import math
import os
import select
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from watchstep.format import segment
from watchstep.format.block import Block

if TYPE_CHECKING:
    import pyarrow as pa


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


MAX_FINDINGS = 8 * 1024 * 1024
"""Largest payload of findings, in bytes: 20,000 with messages of 400 characters."""

MAX_MESSAGE = 500
"""Longest message of a finding, in characters."""

_COUNT = struct.Struct("<I")
_ENTRY = np.dtype([("row", "<i4"), ("value", "<f8"), ("threshold", "<f8"), ("size", "<u4")])


@dataclass(frozen=True)
class FoundRow:
    """What a child says about one row of those that it was sent.

    Attributes:
        row: its place.
        value: of the finding; not NaN.
        threshold: of the finding; not NaN.
        message: at most `MAX_MESSAGE` characters.
    """

    row: int
    value: float
    threshold: float
    message: str


def table_to_bytes(table: pa.Table | pa.RecordBatch) -> bytes:
    """An Arrow table as an IPC stream."""
    import pyarrow as pa

    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return sink.getvalue()


def table_from_bytes(data: bytes | bytearray) -> pa.Table:
    """The table of an IPC stream; its columns lie in ``data``."""
    import pyarrow as pa

    return pa.ipc.open_stream(pa.py_buffer(data)).read_all()


def to_bytes(block: Block) -> bytes:
    """The rows and the catalogue."""
    table = segment.to_table(block)
    return table_to_bytes(
        table.replace_schema_metadata(segment.metadata(segment.catalogue_bytes(block.catalogue)))
    )


def from_bytes(data: bytes | bytearray) -> Block:
    """What `to_bytes` packed.

    Raises:
        FormatError: it is nothing of the kind.
    """
    with segment.whole("from the service"):
        table = table_from_bytes(data)
        catalogue = segment.catalogue_of(table.schema.metadata[segment.CATALOGUE])
        return segment.to_block(table, catalogue, "from the service")


def pack_findings(found: Sequence[FoundRow]) -> bytes:
    """Findings as bytes: their number, an entry of fixed size for each, and the texts of all."""
    texts = [entry.message[:MAX_MESSAGE].encode(errors="replace") for entry in found]
    entries = np.empty(len(found), _ENTRY)
    for place, (entry, text) in enumerate(zip(found, texts, strict=True)):
        entries[place] = (entry.row, entry.value, entry.threshold, len(text))
    return b"".join([_COUNT.pack(len(found)), entries.tobytes(), *texts])


def unpack_findings(data: bytes | bytearray, rows: int) -> list[FoundRow]:
    """What `pack_findings` packed, from a child that is not trusted.

    Args:
        data: at most `MAX_FINDINGS` bytes.
        rows: how many rows the child was sent; there are no more findings, and none is about another row.

    Raises:
        ValueError: it is not a list of such findings; the message says why.
    """
    if len(data) < _COUNT.size:
        raise ValueError("it gives no list of findings")
    (number,) = _COUNT.unpack_from(data)
    if number > rows:
        raise ValueError(f"it gives more findings than rows: {number} for {rows}")
    start = _COUNT.size + number * _ENTRY.itemsize
    if start > len(data):
        raise ValueError("its list of findings is cut short")
    entries = np.frombuffer(data, _ENTRY, number, _COUNT.size)
    if int(entries["size"].sum(dtype=np.int64)) != len(data) - start:
        raise ValueError("the texts of its findings do not have the length that they claim")
    if ((entries["row"] < 0) | (entries["row"] >= rows)).any():
        raise ValueError(f"a finding is about a row that is not among the {rows}")
    found = []
    for entry in entries.tolist():
        row, value, threshold, size = entry
        text = kept(data[start : start + size].decode(errors="replace"))[:MAX_MESSAGE]
        found.append(FoundRow(row, _number(value), _number(threshold), text))
        start += size
    return found


def _number(value: float) -> float:
    """A figure that does not exist is stored as infinity, which JSON and a comparison can hold."""
    return math.inf if math.isnan(value) else value
