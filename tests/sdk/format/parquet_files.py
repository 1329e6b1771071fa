"""Segments as Parquet, whole and changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sdk.format.blocks import BLOCK
from watchstep.errors import FormatError
from watchstep.format.block import Block
from watchstep.format.catalogue import catalogue_bytes, metadata
from watchstep.format.parquet.claims import Claims, claims_of, read_footer
from watchstep.format.parquet.table import to_block, to_table
from watchstep.format.segment_checks import HISTOGRAM_COLUMNS
from watchstep.reading.compaction import encode_compacted
from watchstep.reading.parquet_object import Catalogues, ParquetObject, open_object
from watchstep.store.store import Store


def read_claims(data: bytes) -> Claims:
    """The claims of all columns of a file."""
    return claims_of(data, read_footer(data))


class OneObject:
    """A store with one object."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def get_range(self, _key: str, start: int, length: int) -> bytes:
        return self._data[start : start + length]

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return [memoryview(self.get_range(key, *place)) for place in ranges]


def opened(data: bytes) -> ParquetObject:
    return open_object(cast("Store", OneObject(data)), "run/seg", len(data), Catalogues())


def decode(data: bytes, *, histograms: bool = True) -> Block:
    parquet = opened(data)
    columns = parquet.columns if histograms else parquet.columns - HISTOGRAM_COLUMNS
    return to_block(parquet.read(columns), parquet.catalogue, "run/seg")


def encode(block: Block) -> bytes:
    table = to_table(block).replace_schema_metadata(metadata(catalogue_bytes(block.catalogue)))
    return encode_compacted(table)


WHOLE = encode(BLOCK)


TABLE = pq.read_table(pa.BufferReader(WHOLE))


def written(table: pa.Table, **changed: object) -> bytes:
    """A Parquet file with a segment's metadata, some of it changed."""
    sink = pa.BufferOutputStream()
    metadata = {**TABLE.schema.metadata, **{name.encode(): value for name, value in changed.items()}}
    pq.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd")
    return bytes(sink.getvalue())


def with_column(name: str, values: Any, kind: Any = None) -> bytes:
    """A segment with one column replaced."""
    place = TABLE.schema.get_field_index(name)
    column = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, kind)
    return written(TABLE.set_column(place, name, column))


def refused(data: bytes) -> str:
    with pytest.raises(FormatError, match=r"segment run/seg\b.*\n  hint: ") as caught:
        decode(data)
    return caught.value.what
