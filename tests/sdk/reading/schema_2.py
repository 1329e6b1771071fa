"""Runs of schema 2, made from current ones: segments are Parquet with the writer's options of that schema, and documents state it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from watchstep.format import segment
from watchstep.format.block import Block
from watchstep.format.catalogue import CATALOGUE, META, catalogue_bytes
from watchstep.format.parquet.table import to_table
from watchstep.format.segment_checks import CONSTANT, PROBE, WORD_COLUMNS
from watchstep.format.statistics import VALUE_COLUMNS

_SCHEMA = b'{"schema": 2}'


def parquet_segment(block: Block, more: Mapping[bytes, bytes] | None = None) -> bytes:
    """A segment of schema 2."""
    metadata = {META: _SCHEMA, CATALOGUE: catalogue_bytes(block.catalogue), **(more or {})}
    table = to_table(block).replace_schema_metadata(metadata)
    dense = {*VALUE_COLUMNS, "histogram_bins", "histogram_counts"}
    leaves = {
        name: f"{name}.list.element" if name.startswith("histogram") else name for name in table.column_names
    }
    probes = [name for name in table.column_names if name.startswith(PROBE)]
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression={leaf: "zstd" if name in dense else "lz4" for name, leaf in leaves.items()},
        use_dictionary=list(WORD_COLUMNS),
        use_byte_stream_split=[*VALUE_COLUMNS, *probes],
        write_statistics=["step", "tensor", *CONSTANT],
        write_page_checksum=True,
    )
    return bytes(sink.getvalue())


def as_schema_2(run: Path) -> Path:
    """Rewrite a run, which may be compacted, as the version with schema 2 wrote it; its folder."""
    for path in run.glob("stats/**/*.arrow"):
        data = path.read_bytes()
        more = segment.metadata_of(data, path.name)
        path.with_suffix(".parquet").write_bytes(parquet_segment(segment.decode(data, path.name), more))
        path.unlink()
    for path in run.glob("compacted/**/*.parquet"):
        _compacted_segment(path)
    for path in run.glob("compacted/*/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["sources"] = [source.replace(".arrow", ".parquet") for source in manifest["sources"]]
        for attempt in manifest["attempts"]:
            for entry in (*attempt["segments"], attempt["recent"]):
                if entry is not None:
                    entry["size"] = (run / entry["key"]).stat().st_size
        path.write_text(json.dumps({**manifest, "schema": 2}))
    for path in (run / "run.json", *run.glob("journal/**/*.json")):
        path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))
    return run


def _compacted_segment(path: Path) -> None:
    table = pq.read_table(path, read_dictionary=list(WORD_COLUMNS))
    stored = {**table.schema.metadata, META: _SCHEMA}
    probes = [name for name in table.column_names if name.startswith(PROBE)]
    pq.write_table(
        table.replace_schema_metadata(stored),
        path,
        compression="zstd",
        row_group_size=len(table),
        use_dictionary=["tensor", *CONSTANT],
        use_byte_stream_split=[*VALUE_COLUMNS, *probes],
        write_statistics=["step", "tensor"],
        write_page_checksum=True,
    )
