"""Objects that are small and claim to be large: what a reader must refuse before it takes memory."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.fuzz_objects.bending import safetensors

_MANY = 2**40


def segment_bombs(whole: bytes) -> list[bytes]:
    """Parquet files of few bytes that unpack to gigabytes, or whose text does."""
    table = pq.read_table(pa.BufferReader(whole))
    metadata = dict(table.schema.metadata)
    bombs = []
    for spaces in (64, 512):
        text = base64.b64encode(zlib.compress(b"[" + b" " * (spaces * 1024 * 1024) + b"]", 9))
        bombs.append(_written(table.replace_schema_metadata({**metadata, b"watchstep.tensors": text})))
    for rows in (2_000_000, 30_000_000):
        zeros = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["a"]))
        same = pa.table({name: zeros if name == "tensor" else pa.nulls(rows) for name in table.schema.names})
        bombs.append(_written(same.replace_schema_metadata(metadata)))
    deep = base64.b64encode(zlib.compress(b"[" * 200_000 + b"]" * 200_000))
    bombs.append(_written(table.replace_schema_metadata({**metadata, b"watchstep.tensors": deep})))
    return bombs


def _written(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", compression_level=19)
    return sink.getvalue()


def snapshot_bombs() -> list[bytes]:
    """Snapshots whose headers claim what their bytes do not hold."""
    entry: dict[str, Any] = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    headers: list[object] = [
        {"a": {**entry, "shape": [_MANY, _MANY]}},
        {"a": {**entry, "shape": [0, _MANY]}, "b": entry},
        {"a": {**entry, "data_offsets": [0, _MANY]}},
        {"a": {**entry, "data_offsets": [-16, 0]}},
        {"a": {**entry, "shape": [1] * 100_000}},
        {"a": {**entry, "dtype": "F32" * 1000}},
        {f"t{number}": entry for number in range(20_000)},
        {"__metadata__": {"x": "y" * 1_000_000}, "a": entry},
        {"__metadata__": {"watchstep.packed": json.dumps({"a": [[0, 16, _MANY]]})}, "a": entry},
        {"__metadata__": "no", "a": entry},
        [entry],
    ]
    bombs = [safetensors(header, bytes(16)) for header in headers]
    bombs.append(struct.pack("<Q", 2**63 - 1) + b"{}")
    bombs.append(struct.pack("<Q", 400_000) + b"[" * 400_000)
    return bombs


def document_bombs(dice: random.Random) -> list[bytes]:
    """JSON that is deep, long, or full of numbers that are none."""
    return [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"version": ' + b"9" * 100_000 + b"}",
        b'{"version": 1e999999}',
        b'{"version": NaN}',
        b'{"snapshots": [' + b'{"id":"x","step":1},' * 50_000 + b"]}",
        b"\xff\xfe" + dice.randbytes(1000),
        json.dumps({"version": 1, "cadence": [["x" * 1_000_000, 1]]}).encode(),
    ]
