"""The two Arrow IPC streams of a segment, read and written by pyarrow."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

FACTS = b"watchstep.segment"


@dataclass(frozen=True)
class Streams:
    """A segment as another program reads it.

    Attributes:
        columns: Columns of the rows.
        metadata: Metadata of the first stream.
        facts: The facts about the segment in the metadata of its rows.
        histograms: Columns of the second stream.
        more: Metadata of the second stream.
    """

    columns: dict[str, Any]
    metadata: dict[bytes, bytes]
    facts: dict[str, Any]
    histograms: dict[str, Any]
    more: dict[bytes, bytes]

    @classmethod
    def read(cls, data: bytes) -> Streams:
        """Read a segment by pyarrow."""
        source = pa.BufferReader(data)
        rows, facts = _read(source)
        bins, _ = _read(source)
        assert source.tell() == len(data)
        return cls(
            dict(zip(rows.schema.names, rows.columns, strict=True)),
            dict(rows.schema.metadata or {}),
            json.loads(facts[FACTS][8:]),
            dict(zip(bins.schema.names, bins.columns, strict=True)),
            dict(bins.schema.metadata or {}),
        )

    def with_column(self, name: str, values: Any, kind: Any = None) -> Streams:
        """Return the same streams with one column of the rows replaced or added, and no constant of that name."""
        column = values if isinstance(values, pa.Array) else pa.array(values, kind)
        constant = {key: value for key, value in self.facts["constant"].items() if key != name}
        return replace(
            self, columns={**self.columns, name: column}, facts={**self.facts, "constant": constant}
        )

    def without(self, name: str) -> Streams:
        """Return the same streams without a column or a constant."""
        streams = self.with_column(name, [])
        return replace(streams, columns={key: values for key, values in self.columns.items() if key != name})

    def with_facts(self, **facts: Any) -> Streams:
        """Return the same streams with other facts."""
        return replace(self, facts={**self.facts, **facts})

    def with_histograms(self, bins: list[Any], counts: list[Any], lengths: list[int]) -> Streams:
        """Return the same streams with other histograms."""
        changed = self.with_column("histogram_length", lengths, pa.int32())
        columns = {
            "histogram_bins": pa.array(bins, pa.int16()),
            "histogram_counts": pa.array(counts, pa.int64()),
        }
        return replace(changed.with_facts(histogram_values=len(bins)), histograms=columns)

    def with_metadata(self, **metadata: bytes | str) -> Streams:
        """Return the same streams with other metadata of the first."""
        changed = {
            name.replace("__", ".").encode(): value.encode() if isinstance(value, str) else value
            for name, value in metadata.items()
        }
        return replace(self, metadata={**self.metadata, **changed})

    def encode(
        self,
        *,
        packed_facts: bytes | None = None,
        stated: Mapping[str, Any] | None = None,
        compression: str | None = "lz4",
        **options: Any,
    ) -> bytes:
        """Write the segment by pyarrow.

        Args:
            packed_facts: The facts with their checksum; None for those of the streams, with the checksum of the column names and
                the size of the second stream.
            stated: Facts that replace these.
            compression: As for pyarrow.
            options: Options of pyarrow's writer.
        """
        options = {"compression": compression, **options}
        bins = _written(self.histograms, self.more, {}, options)
        if packed_facts is None:
            names = checksum(*(name.encode() for name in self.columns))
            facts = {**self.facts, "columns": names, "histogram_bytes": len(bins), **(stated or {})}
            packed_facts = with_checksum(json.dumps(facts).encode())
        return _written(self.columns, self.metadata, {FACTS: packed_facts}, options) + bins


def checksum(*texts: bytes) -> int:
    """Return the checksum of names in a segment's facts."""
    return zlib.crc32(b"\0".join(texts))


def with_checksum(facts: bytes) -> bytes:
    """Return facts as in a segment's metadata."""
    return b"%08x" % zlib.crc32(facts) + facts


def _read(source: pa.BufferReader) -> tuple[pa.RecordBatch, dict[bytes, bytes]]:
    with pa.ipc.open_stream(source) as stream:
        read = stream.read_next_batch_with_custom_metadata()
        assert not list(stream)
    read.batch.validate(full=True)
    return read.batch, dict(read.custom_metadata or {})


def _written(
    columns: dict[str, Any], metadata: dict[bytes, bytes], facts: dict[bytes, bytes], options: dict[str, Any]
) -> bytes:
    batch = pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])
    batch = batch.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
        stream.write_batch(batch, custom_metadata=facts)
    return bytes(sink.getvalue())
