"""Messages of Arrow IPC streams with columns of plain numbers: writing, and reading without trust in any length.

An encapsulated message is a continuation marker, the length of its metadata, the metadata (a flatbuffer), and the body that the metadata
describe. Formats: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc, ``Schema.fbs`` and
``Message.fbs`` of Arrow, and https://flatbuffers.dev/internals/.

Columns have no nulls, no children and no dictionaries. Buffers of a body are LZ4 frames with a checksum of each block. LZ4 makes at most 255
bytes of each byte, so that a short object cannot take much memory.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flatbuffers
import lz4.frame
import numpy as np
from numpy.typing import NDArray

Bytes = bytes | memoryview

_CONTINUATION = 0xFFFFFFFF
_PREFIX = struct.Struct("<Ii")
_ALIGNMENT = 8
END_OF_STREAM = _PREFIX.pack(_CONTINUATION, 0)

_VERSION_5 = 4
_SCHEMA, _BATCH = 1, 3  # of the union MessageHeader
_INT, _FLOAT = 2, 3  # of the union Type
_DOUBLE = 2
_LZ4_FRAME = 0
_BODY_SLOTS = {"version": 0, "kind": 1, "header": 2, "body": 3, "metadata": 4}

_MAX_METADATA = 64 * 1024 * 1024  # of one message
_MAX_FIELDS = 256
_MAX_PAIRS = 16
_MAX_NAME = 4096
_MAX_SLOTS = 64  # of one table; those of Arrow have eight at most

_DTYPES = {"i1": np.int8, "i2": np.int16, "i4": np.int32, "i8": np.int64, "f8": np.float64}


class TruncatedError(ValueError):
    """The data ends before a message does.

    Attributes:
        required: Number of bytes from the start of the data that the message takes at least.
    """

    def __init__(self, required: int) -> None:
        super().__init__(f"is cut short: {required} bytes are required")
        self.required = required


class Column(NamedTuple):
    """Name and NumPy type of a column."""

    name: str
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Schema:
    """Columns of a stream, and its metadata."""

    columns: tuple[Column, ...]
    metadata: Mapping[bytes, bytes]


@dataclass(frozen=True)
class StreamBatch:
    """Rows of a stream.

    Attributes:
        rows: Number of rows.
        parts: Offset and length in bytes of each column's values, from the start of the body.
        compressed: Whether the values are LZ4 frames behind their decoded length.
        body: Offset of the body from the start of the data.
        end: Offset of the end of the body.
        metadata: Metadata of the batch.
    """

    rows: int
    parts: tuple[tuple[int, int], ...]
    compressed: bool
    body: int
    end: int
    metadata: Mapping[bytes, bytes]


# Writing


@functools.lru_cache(maxsize=8)
def schema_message(columns: tuple[Column, ...], metadata: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """Encode the message that begins a stream. The last messages are kept, because the segments of a writer share one."""
    builder = flatbuffers.Builder(1024)
    fields = [_field(builder, column) for column in columns]
    builder.StartVector(4, len(fields), 4)
    for field in reversed(fields):
        builder.PrependUOffsetTRelative(field)
    vector = builder.EndVector()
    pairs = _pairs(builder, metadata)
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(1, vector, 0)
    builder.PrependUOffsetTRelativeSlot(2, pairs, 0)
    return _message(builder, _SCHEMA, builder.EndObject(), 0, None)


def _field(builder: flatbuffers.Builder, column: Column) -> int:
    name = builder.CreateString(column.name)
    if column.dtype.kind == "f":
        builder.StartObject(1)
        builder.PrependInt16Slot(0, _DOUBLE, 0)
    else:
        builder.StartObject(2)
        builder.PrependInt32Slot(0, 8 * column.dtype.itemsize, 0)
        builder.PrependBoolSlot(1, True, False)
    kind = builder.EndObject()
    builder.StartVector(4, 0, 4)
    children = builder.EndVector()
    builder.StartObject(7)
    builder.PrependUOffsetTRelativeSlot(0, name, 0)
    builder.PrependUint8Slot(2, _FLOAT if column.dtype.kind == "f" else _INT, 0)
    builder.PrependUOffsetTRelativeSlot(3, kind, 0)
    builder.PrependUOffsetTRelativeSlot(5, children, 0)
    return int(builder.EndObject())


def _pairs(builder: flatbuffers.Builder, metadata: Sequence[tuple[bytes, bytes]]) -> int:
    offsets = []
    for key, value in metadata:
        words = builder.CreateString(key), builder.CreateString(value)
        builder.StartObject(2)
        builder.PrependUOffsetTRelativeSlot(0, words[0], 0)
        builder.PrependUOffsetTRelativeSlot(1, words[1], 0)
        offsets.append(builder.EndObject())
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())


def _message(builder: flatbuffers.Builder, kind: int, header: int, body: int, metadata: int | None) -> bytes:
    builder.StartObject(5)
    builder.PrependInt64Slot(_BODY_SLOTS["body"], body, 0)
    builder.PrependUOffsetTRelativeSlot(_BODY_SLOTS["header"], header, 0)
    if metadata is not None:
        builder.PrependUOffsetTRelativeSlot(_BODY_SLOTS["metadata"], metadata, 0)
    builder.PrependInt16Slot(_BODY_SLOTS["version"], _VERSION_5, 0)
    builder.PrependUint8Slot(_BODY_SLOTS["kind"], kind, 0)
    builder.Finish(builder.EndObject())
    data = bytes(builder.Output())
    padding = -(len(data) + _PREFIX.size) % _ALIGNMENT
    return b"".join([_PREFIX.pack(_CONTINUATION, len(data) + padding), data, bytes(padding)])


def batch_message(values: Sequence[NDArray[Any]], metadata: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    """Encode one batch: its message and its body.

    Args:
        values: Contiguous arrays of shape (n,), in the order of the stream's columns.
        metadata: Metadata of the batch.
    """
    rows = len(values[0]) if values else 0
    pieces: list[bytes] = []
    buffers = np.zeros((2 * len(values), 2), "<i8")  # each column has a buffer for nulls, which is empty
    offset = 0
    for place, array in enumerate(values):
        piece = _compressed(array)
        buffers[2 * place] = offset, 0
        buffers[2 * place + 1] = offset, len(piece)
        padding = -len(piece) % _ALIGNMENT
        pieces += [piece, bytes(padding)]
        offset += len(piece) + padding
    nodes = np.zeros((len(values), 2), "<i8")
    nodes[:, 0] = rows
    builder = flatbuffers.Builder(2048)
    pairs = _pairs(builder, metadata)
    node_vector, buffer_vector = _structs(builder, nodes), _structs(builder, buffers)
    builder.StartObject(2)
    builder.PrependInt8Slot(
        0, _LZ4_FRAME, 1
    )  # 1 is not the default of the format: the slot is always written
    compression = builder.EndObject()
    builder.StartObject(5)
    builder.PrependInt64Slot(0, rows, 0)
    builder.PrependUOffsetTRelativeSlot(1, node_vector, 0)
    builder.PrependUOffsetTRelativeSlot(2, buffer_vector, 0)
    builder.PrependUOffsetTRelativeSlot(3, compression, 0)
    message = _message(builder, _BATCH, builder.EndObject(), offset, pairs)
    return b"".join([message, *pieces])


def _structs(builder: flatbuffers.Builder, structs: NDArray[np.int64]) -> int:
    """Write a vector of structs of two int64."""
    builder.StartVector(16, len(structs), 8)
    # As `Builder.CreateByteVector` does, which counts bytes and not structs.
    builder.head = builder.Head() - structs.nbytes
    builder.Bytes[builder.head : builder.head + structs.nbytes] = structs.tobytes()
    return int(builder.EndVector())


def _compressed(values: NDArray[Any]) -> bytes:
    """Return the values as a buffer of a compressed body: the decoded length, and an LZ4 frame."""
    if not len(values):
        return b""
    # A checksum of the compressed blocks costs less than one of their content.
    frame = lz4.frame.compress(values.view(np.uint8).data, block_checksum=True, store_size=False)
    return values.nbytes.to_bytes(8, "little") + bytes(frame)


# Reading


def message_end(data: Bytes, offset: int) -> tuple[int, int]:
    """Return the offsets of a message's metadata and of their end.

    Raises:
        TruncatedError: The data ends before.
        ValueError: There is no message.
    """
    start = offset + _PREFIX.size
    if len(data) < start:
        raise TruncatedError(start)
    marker, length = _PREFIX.unpack_from(data, offset)
    if marker != _CONTINUATION or not 0 < length <= _MAX_METADATA or length % _ALIGNMENT:
        raise ValueError("there is no message of an Arrow stream at its place")
    if len(data) < start + length:
        raise TruncatedError(start + length)
    return start, start + length


def read_schema(metadata: Bytes) -> Schema:
    """Parse the metadata of the message that begins a stream.

    Raises:
        ValueError: They are damaged, or a column is not of plain numbers.
    """
    header, _ = _header(metadata, _SCHEMA)
    if header.number(0, "<h", 0) != 0:
        raise ValueError("its numbers are big-endian")
    columns = tuple(_read_field(field) for field in header.tables(1, _MAX_FIELDS))
    if len({column.name for column in columns}) != len(columns):
        raise ValueError("two columns have the same name")
    return Schema(columns, _read_pairs(header, 2))


def _read_field(field: _Table) -> Column:
    name = field.text(0, _MAX_NAME).decode()
    kind = field.table(3)
    if field.has(4) or field.tables(5, 1):
        raise ValueError(f"column {name[:80]} is not of plain numbers")
    match field.number(2, "<B", 0):
        case 2 if kind.number(1, "<?", False):
            code = f"i{kind.number(0, '<i', 0) // 8}"
        case 3 if kind.number(0, "<h", 0) == _DOUBLE:
            code = "f8"
        case _:
            code = ""
    if code not in _DTYPES:
        raise ValueError(f"column {name[:80]} is not of a type of segments")
    return Column(name, np.dtype(_DTYPES[code]))


def read_batch(data: Bytes, start: int, end: int, columns: Sequence[Column]) -> StreamBatch:
    """Parse the metadata of a message with rows, and check the places of its buffers.

    Args:
        data: The object, at least up to ``end``.
        start: Offset of the metadata.
        end: Offset of their end, where the body begins.
        columns: Columns of the stream.

    Raises:
        ValueError: The message is damaged, or contradicts the columns.
    """
    header, message = _header(data[start:end], _BATCH)
    rows, body = header.number(0, "<q", 0), message.number(_BODY_SLOTS["body"], "<q", 0)
    nodes, buffers = header.structs(1, _MAX_FIELDS), header.structs(2, 2 * _MAX_FIELDS)
    if rows < 0 or body < 0 or len(nodes) != len(columns) or len(buffers) != 2 * len(columns):
        raise ValueError("its rows are not those of its columns")
    if (nodes[:, 0] != rows).any() or nodes[:, 1].any():
        raise ValueError("a column has nulls, or another number of rows")
    values = buffers[1::2]
    ends = values[:, 0] + values[:, 1]  # both are below the body's length, so that the sum does not overflow
    if (values < 0).any() or (values > body).any() or (ends > body).any():
        raise ValueError("a column lies outside of its body")
    occupied = values[values[:, 1] > 0]
    occupied = occupied[np.argsort(occupied[:, 0], kind="stable")]
    if (occupied[:-1].sum(axis=1) > occupied[1:, 0]).any():
        raise ValueError("a column lies over another")
    compression = header.table(3) if header.has(3) else None
    if compression is not None and (
        compression.number(0, "<b", _LZ4_FRAME) != _LZ4_FRAME or compression.number(1, "<b", 0) != 0
    ):
        raise ValueError("it has another compression than LZ4")
    return StreamBatch(
        int(rows),
        tuple((int(offset), int(length)) for offset, length in values.tolist()),
        compression is not None,
        end,
        end + int(body),
        _read_pairs(message, _BODY_SLOTS["metadata"]),
    )


def column_values(data: Bytes, batch: StreamBatch, place: int, column: Column) -> NDArray[Any]:
    """Return a column's values, shape (rows,). The result is as large as the rows require, whatever the data claims.

    Args:
        data: The object; bytes of other columns may be missing or zero.
        batch: Its batch.
        place: Index of the column.
        column: The column.

    Raises:
        ValueError, RuntimeError: The values are damaged.
    """
    offset, length = batch.parts[place]
    size = batch.rows * column.dtype.itemsize
    start = batch.body + offset
    piece = memoryview(data)[start : start + length]
    if len(piece) != length:
        raise TruncatedError(start + length)
    if batch.compressed and size:
        if length < 8:
            raise ValueError(f"column {column.name[:80]} has no length")
        claimed = int.from_bytes(piece[:8], "little", signed=True)
        piece = piece[8:]
        if claimed != -1:  # -1: not compressed
            if claimed != size:
                raise ValueError(
                    f"column {column.name[:80]} claims {claimed} bytes for {batch.rows} rows, not {size}"
                )
            piece = memoryview(_decompressed(piece, size, column.name))
    if len(piece) != size:
        raise ValueError(
            f"column {column.name[:80]} has {len(piece)} bytes for {batch.rows} rows, not {size}"
        )
    values = np.frombuffer(piece, column.dtype)
    # Arrow computes with aligned numbers only; those of other writers may lie anywhere in the object.
    return values if values.flags.aligned else values.copy()


def _decompressed(frame: memoryview, size: int, name: str) -> bytes:
    decompressor = lz4.frame.LZ4FrameDecompressor()
    values: bytes = decompressor.decompress(frame, max_length=size)
    if len(values) == size and not decompressor.eof:
        # The end of the frame may come behind the last value.
        values += decompressor.decompress(b"", max_length=1)
    if len(values) != size or not decompressor.eof or decompressor.unused_data:
        raise ValueError(f"column {name[:80]} is not a complete LZ4 frame of {size} bytes")
    return values


class _Table:
    """A table of a flatbuffer. All offsets are checked against the buffer's size."""

    def __init__(self, data: Bytes, place: int) -> None:
        self._data, self._place = data, place
        vtable = place - _unpack("<i", data, place)
        size = _unpack("<H", data, vtable)
        if size % 2 or not 4 <= size <= 4 + 2 * _MAX_SLOTS:
            raise ValueError("a header is damaged")
        self._slots = _unpack_many(f"<{size // 2}H", data, vtable)[2:]

    @property
    def size(self) -> int:
        """Bytes of the whole flatbuffer."""
        return len(self._data)

    def has(self, slot: int) -> bool:
        return slot < len(self._slots) and self._slots[slot] != 0

    def number(self, slot: int, form: str, default: Any) -> Any:
        return _unpack(form, self._data, self._place + self._slots[slot]) if self.has(slot) else default

    def table(self, slot: int) -> _Table:
        return _Table(self._data, self._target(slot))

    def text(self, slot: int, limit: int) -> bytes:
        if not self.has(slot):
            return b""
        start, length = self._vector(slot)
        if length > limit or start + length > len(self._data):
            raise ValueError(f"a text of {length} bytes is too long")
        return bytes(self._data[start : start + length])

    def tables(self, slot: int, limit: int) -> list[_Table]:
        if not self.has(slot):
            return []
        start, length = self._vector(slot)
        if length > limit:
            raise ValueError(f"a header has {length} entries; {limit} are read")
        places = range(start, start + 4 * length, 4)
        return [_Table(self._data, place + _unpack("<I", self._data, place)) for place in places]

    def structs(self, slot: int, limit: int) -> NDArray[np.int64]:
        """Return a vector of structs of two int64, shape (n, 2)."""
        if not self.has(slot):
            return np.empty((0, 2), np.int64)
        start, length = self._vector(slot)
        if length > limit or start + 16 * length > len(self._data):
            raise ValueError(f"a header has {length} entries; {limit} are read")
        return np.frombuffer(self._data, "<i8", 2 * length, start).reshape(length, 2)

    def _target(self, slot: int) -> int:
        if not self.has(slot):
            raise ValueError("a header is incomplete")
        place: int = self._place + self._slots[slot]
        offset: int = _unpack("<I", self._data, place)
        return place + offset

    def _vector(self, slot: int) -> tuple[int, int]:
        place = self._target(slot)
        length: int = _unpack("<I", self._data, place)
        return place + 4, length


def _header(metadata: Bytes, kind: int) -> tuple[_Table, _Table]:
    """Return the header of a message, and the message."""
    message = _Table(metadata, _unpack("<I", metadata, 0))
    if message.number(_BODY_SLOTS["version"], "<h", 0) != _VERSION_5:
        raise ValueError("it has another version of Arrow's format than 5")
    if message.number(_BODY_SLOTS["kind"], "<B", 0) != kind:
        raise ValueError("it has a message of another kind")
    return message.table(_BODY_SLOTS["header"]), message


def _read_pairs(table: _Table, slot: int) -> dict[bytes, bytes]:
    # Texts may overlap in a hostile header, so that their sum is limited, too.
    remaining = table.size
    pairs: dict[bytes, bytes] = {}
    for pair in table.tables(slot, _MAX_PAIRS):
        key = pair.text(0, _MAX_NAME)
        pairs[key] = pair.text(1, remaining)
        remaining -= len(pairs[key])
    return pairs


def _unpack(form: str, data: Bytes, place: int) -> Any:
    return _unpack_many(form, data, place)[0]


def _unpack_many(form: str, data: Bytes, place: int) -> tuple[Any, ...]:
    if place < 0:
        raise ValueError("a header is damaged")
    try:
        return struct.unpack_from(form, data, place)
    except struct.error as error:
        raise ValueError("a header is cut short") from error
