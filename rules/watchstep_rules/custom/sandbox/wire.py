"""What goes between parent and child beside documents: rows as Arrow IPC, and findings in a typed binary form.

Both are checked where they are read. A segment's own checks hold for rows. Findings have a fixed number of bytes each and
a text of bounded length, so that a child's reply costs its parent little more than its own size.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from watchstep.format import segment
from watchstep.format.block import Block
from watchstep_rules.custom.sandbox.frames import kept

if TYPE_CHECKING:
    import pyarrow as pa

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
