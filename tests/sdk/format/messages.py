"""Messages of Arrow IPC with any values in their headers, for tests and fuzzers of hostile ones."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import flatbuffers
import lz4.frame
import numpy as np

from watchstep.format import ipc

Slots = dict[int, tuple[str, Any]]
Build = Callable[[flatbuffers.Builder], int]

COLUMNS = (ipc.Column("a", np.dtype(np.int64)), ipc.Column("b", np.dtype(np.int16)))
ROWS = 16
A, B = np.arange(ROWS), np.arange(ROWS, dtype=np.int16)


def table(builder: flatbuffers.Builder, slots: Slots) -> int:
    """A table: the type and the value of each slot."""
    builder.StartObject(max(slots, default=-1) + 1)
    for slot, (kind, value) in slots.items():
        if kind == "offset":
            builder.PrependUOffsetTRelativeSlot(slot, value, 0)
        else:
            getattr(builder, f"Prepend{kind}Slot")(slot, value, None)
    return int(builder.EndObject())


def vector(builder: flatbuffers.Builder, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())


def structs(builder: flatbuffers.Builder, pairs: Sequence[tuple[int, int]]) -> int:
    builder.StartVector(16, len(pairs), 8)
    for first, second in reversed(pairs):
        builder.PrependInt64(second)
        builder.PrependInt64(first)
    return int(builder.EndVector())


def message(header: Build, kind: int, body: int = 0, version: int = 4) -> bytes:
    """The metadata of a message."""
    builder = flatbuffers.Builder(1024)
    offset = header(builder)
    slots: Slots = {
        0: ("Int16", version), 1: ("Uint8", kind), 2: ("offset", offset), 3: ("Int64", body)
    }  # fmt: skip
    builder.Finish(table(builder, slots))
    return bytes(builder.Output())


def padded(metadata: bytes) -> bytes:
    metadata += bytes(-len(metadata) % 8)
    return struct.pack("<Ii", -1 & 0xFFFFFFFF, len(metadata)) + metadata


def compressed(values: Any) -> bytes:
    return bytes(values.nbytes.to_bytes(8, "little") + lz4.frame.compress(values.tobytes()))


def batch(
    pieces: Sequence[bytes] | None = None,
    *,
    rows: int = ROWS,
    nodes: Sequence[tuple[int, int]] | None = None,
    places: Sequence[tuple[int, int]] | None = None,
    body: int | None = None,
    codec: int | None = 0,
    method: int = 0,
    version: int = 4,
    kind: int = 3,
) -> bytes:
    """A message with rows of `COLUMNS`, and its body; the pieces follow each other unless ``places`` states other ones."""
    pieces = [compressed(A), compressed(B)] if pieces is None else pieces
    if places is None:
        ends = np.cumsum([0, *map(len, pieces)]).tolist()
        places = [(start, len(piece)) for start, piece in zip(ends, pieces, strict=False)]
    nodes = [(rows, 0)] * len(places) if nodes is None else nodes
    buffers = [place for values in places for place in ((0, 0), values)]
    data = b"".join(pieces)

    def header(builder: flatbuffers.Builder) -> int:
        slots: Slots = {
            0: ("Int64", rows),
            1: ("offset", structs(builder, nodes)),
            2: ("offset", structs(builder, buffers)),
        }
        if codec is not None:
            slots[3] = "offset", table(builder, {0: ("Int8", codec), 1: ("Int8", method)})
        return table(builder, slots)

    size = len(data) if body is None else body
    return padded(message(header, kind, size, version)) + data


def schema_metadata(
    fields: Sequence[Slots] | None = None,
    pairs: Callable[[flatbuffers.Builder], list[Slots]] | None = None,
    endianness: int = 0,
    **options: Any,
) -> bytes:
    """The metadata of a schema message with int64 columns, and other slots in them."""

    def header(builder: flatbuffers.Builder) -> int:
        offsets = []
        for number, changed in enumerate([{}] if fields is None else fields):
            name = builder.CreateString(f"c{number}")
            kind = table(builder, {0: ("Int32", 64), 1: ("Bool", True)})
            slots: Slots = {0: ("offset", name), 2: ("Uint8", 2), 3: ("offset", kind)}
            offsets.append(table(builder, {**slots, **changed}))
        slots = {0: ("Int16", endianness), 1: ("offset", vector(builder, offsets))}
        if pairs is not None:
            slots[2] = "offset", vector(builder, [table(builder, pair) for pair in pairs(builder)])
        return table(builder, slots)

    return message(header, options.pop("kind", 1), **options)
