"""A block as Arrow IPC and back: the columns and checks of a segment, without its compression."""

from __future__ import annotations

import io

from watchstep import segment
from watchstep.block import Block


def to_bytes(block: Block) -> bytes:
    """The rows and the catalogue."""
    import pyarrow as pa

    table = segment.to_table(block)
    table = table.replace_schema_metadata(segment.metadata(segment.catalogue_bytes(block.catalogue)))
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def from_bytes(data: bytes) -> Block:
    """What `to_bytes` packed.

    Raises:
        FormatError: it is nothing of the kind.
    """
    import pyarrow as pa

    with segment.whole("from the service"):
        table = pa.ipc.open_stream(pa.BufferReader(data)).read_all()
        catalogue = segment.catalogue_of(table.schema.metadata[segment.CATALOGUE])
        return segment.to_block(table, catalogue, "from the service")
