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
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep.format.catalogue import CATALOGUE, catalogue_bytes, catalogue_of, metadata
from watchstep.format.parquet.table import to_block, to_table
from watchstep.format.segment_checks import whole

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
    """Maximum size of a message that the parent reads.

    Attributes:
        document: bytes of the JSON document. Parsing takes up to 25 times as much memory.
        payload: bytes of the payload.
    """

    document: int
    payload: int = 0


SHORT = FrameLimits(_MEGABYTE + _MEGABYTE // 16)
"""A rule state of at most 1 MiB, and the rest of its document."""


@dataclass(frozen=True)
class Reply:
    """A child's message.

    Attributes:
        document: the parsed JSON.
        payload: the bytes after the document.
    """

    document: Any
    payload: bytearray


def pack(document: Any, parts: Parts = ()) -> bytes:
    """Pack a message."""
    head = json.dumps({"document": document, "parts": [len(part) for part in parts]}).encode()
    return b"".join([_HEAD.pack(len(head), sum(map(len, parts))), head, *parts])


def kept(text: str) -> str:
    """Replace what a database cannot store in a text of the other side: lone surrogates and null characters."""
    return text.encode(errors="replace").decode().replace("\0", "\ufffd")


def read_blocking(descriptor: int) -> tuple[Any, list[bytearray]]:
    """Read a message in the child.

    Raises:
        EOFError: the parent closed the pipe.
    """
    length, _ = _HEAD.unpack(_exactly(descriptor, _HEAD.size))
    head = json.loads(_exactly(descriptor, length))
    return head["document"], [_exactly(descriptor, size) for size in head["parts"]]


def write_blocking(descriptor: int, data: bytes) -> None:
    """Write all bytes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def send(descriptor: int, data: bytes, deadline: float) -> None:
    """Write a message in the parent, without blocking on a child that does not read.

    Args:
        descriptor: non-blocking descriptor.
        data: message from `pack`.
        deadline: as `time.monotonic`.

    Raises:
        FrameError: the child ended, or the deadline passed.
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
    """Read the next message of the child.

    Raises:
        FrameError: the child ended, the deadline passed, or the message is invalid or too long.
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
    remaining = deadline - time.monotonic()
    if remaining <= 0 or not poll.poll(remaining * 1000):
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
"""Maximum payload of findings, in bytes: 20,000 findings with messages of 400 characters."""

MAX_MESSAGE = 500
"""Maximum length of a finding's message, in characters."""

_COUNT = struct.Struct("<I")
_ENTRY = np.dtype([("row", "<i4"), ("value", "<f8"), ("threshold", "<f8"), ("size", "<u4")])


@dataclass(frozen=True)
class FoundRow:
    """A finding of a child about one of the rows that it received.

    Attributes:
        row: index of the row.
        value: value of the finding; not NaN.
        threshold: threshold of the finding; not NaN.
        message: message of at most `MAX_MESSAGE` characters.
    """

    row: int
    value: float
    threshold: float
    message: str


def arrays_to_bytes(arrays: Sequence[NDArray[Any] | None]) -> bytes:
    """Pack arrays: a JSON list of their dtypes and shapes, and their bytes. None stays None."""
    described = [None if array is None else [array.dtype.str, list(array.shape)] for array in arrays]
    head = json.dumps(described).encode()
    parts = [np.ascontiguousarray(array).data for array in arrays if array is not None]
    return b"".join([_COUNT.pack(len(head)), head, *parts])


def arrays_from_bytes(data: bytearray) -> list[NDArray[Any] | None]:
    """Unpack the result of `arrays_to_bytes`, in the child; the arrays share its memory."""
    (length,) = _COUNT.unpack_from(data)
    place = _COUNT.size + length
    arrays: list[NDArray[Any] | None] = []
    for described in json.loads(data[_COUNT.size : place]):
        if described is None:
            arrays.append(None)
            continue
        dtype, shape = np.dtype(described[0]), tuple(described[1])
        count = math.prod(shape)
        arrays.append(
            np.frombuffer(data, dtype, count, place).reshape(shape) if count else np.empty(shape, dtype)
        )
        place += count * dtype.itemsize
    return arrays


def table_to_bytes(table: pa.Table | pa.RecordBatch) -> bytes:
    """Serialize an Arrow table as an IPC stream."""
    import pyarrow as pa

    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return sink.getvalue()


def table_from_bytes(data: bytes | bytearray) -> pa.Table:
    """Return the table of an IPC stream. Its columns share the memory of ``data``."""
    import pyarrow as pa

    return pa.ipc.open_stream(pa.py_buffer(data)).read_all()


def to_bytes(block: Block) -> bytes:
    """Serialize the rows and the catalogue of a block."""
    table = to_table(block)
    return table_to_bytes(table.replace_schema_metadata(metadata(catalogue_bytes(block.catalogue))))


def from_bytes(data: bytes | bytearray) -> Block:
    """Deserialize the result of `to_bytes`.

    Raises:
        FormatError: the data is not a serialized block.
    """
    with whole("from the service"):
        table = table_from_bytes(data)
        catalogue = catalogue_of(table.schema.metadata[CATALOGUE])
        return to_block(table, catalogue, "from the service")


def pack_findings(found: Sequence[FoundRow]) -> bytes:
    """Serialize findings: their number, an entry of fixed size for each, then all texts."""
    texts = [entry.message[:MAX_MESSAGE].encode(errors="replace") for entry in found]
    entries = np.empty(len(found), _ENTRY)
    for index, (entry, text) in enumerate(zip(found, texts, strict=True)):
        entries[index] = (entry.row, entry.value, entry.threshold, len(text))
    return b"".join([_COUNT.pack(len(found)), entries.tobytes(), *texts])


def unpack_findings(data: bytes | bytearray, rows: int) -> list[FoundRow]:
    """Deserialize the result of `pack_findings` from an untrusted child.

    Args:
        data: at most `MAX_FINDINGS` bytes.
        rows: number of rows that the child received. The number of findings and their row indices are checked against it.

    Raises:
        ValueError: the data is not a list of such findings; the message gives the reason.
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
    findings = []
    for entry in entries.tolist():
        row, value, threshold, size = entry
        text = kept(data[start : start + size].decode(errors="replace"))[:MAX_MESSAGE]
        findings.append(FoundRow(row, _number(value), _number(threshold), text))
        start += size
    return findings


def _number(value: float) -> float:
    """Replace NaN by infinity, which can be compared."""
    return math.inf if math.isnan(value) else value
