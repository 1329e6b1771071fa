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
_MANY_ROWS = 1_100_000
_NAMED_ROWS = 152
_LONG_NAME = 5_000_000
_LONGEST_NAME = 600_000_000
_BINS = 32


def compacted_bombs(whole: bytes) -> list[bytes]:
    """Parquet files of few bytes that unpack to gigabytes, or whose text does."""
    table = pq.read_table(pa.BufferReader(whole))
    metadata = dict(table.schema.metadata)
    bombs = []
    for spaces in (64, 512):
        text = base64.b64encode(zlib.compress(b"[" + b" " * (spaces * 1024 * 1024) + b"]", 9))
        bombs.append(_written(table.replace_schema_metadata({**metadata, b"watchstep.tensors": text})))
    bombs.append(_written(table.slice(0, 1).take(np.zeros(_MANY_ROWS, np.int64))))
    for text in (
        b"[" * 200_000 + b"]" * 200_000,
        b"[" + b"[]," * 5_000_000 + b"[]]",
        b"[" + b'{"a":1},' * 2_000_000 + b"{}]",
    ):
        packed = base64.b64encode(zlib.compress(text, 9))
        bombs.append(_written(table.replace_schema_metadata({**metadata, b"watchstep.tensors": packed})))
    return [
        *bombs,
        *name_bombs(whole),
        repeated_histograms(whole, 25_000_000),
        *row_group_bombs(whole),
        repeated_histograms(whole, 25_000_000, use_compliant_nested_type=False),
        swapped_columns(whole),
    ]


def name_bombs(whole: bytes) -> list[bytes]:
    """Segments in which all rows share one long name, each in another of Parquet's encodings."""
    table = pq.read_table(pa.BufferReader(whole))
    table = table.slice(0, 1).take(np.zeros(_NAMED_ROWS, np.int64)) if len(table) else table
    catalogue = json.loads(zlib.decompress(base64.b64decode(table.schema.metadata[b"watchstep.tensors"])))
    name = "n" * _LONG_NAME
    packed = base64.b64encode(zlib.compress(json.dumps([{**catalogue[0], "name": name}]).encode(), 9))
    place = table.schema.get_field_index("tensor")
    shared = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(table), np.int32)), pa.array([name]))
    named = table.set_column(place, "tensor", shared)
    named = named.replace_schema_metadata({**table.schema.metadata, b"watchstep.tensors": packed})
    plain = named.set_column(place, "tensor", shared.cast(pa.string()))
    return [
        _written(named),
        _written(plain),
        _written(plain, use_dictionary=False),
        _written(plain, use_dictionary=False, column_encoding={"tensor": "DELTA_BYTE_ARRAY"}),
        _written(plain, use_dictionary=False, column_encoding={"tensor": "DELTA_LENGTH_BYTE_ARRAY"}),
        _written(named.replace_schema_metadata(table.schema.metadata)),
    ]


def repeated_histograms(whole: bytes, values: int, **options: Any) -> bytes:
    """A segment whose histograms repeat one value, so that its pages hold next to nothing of them."""
    table = pq.read_table(pa.BufferReader(whole)).slice(0, 1)
    rows = -(-values // _BINS)
    table = table.take(np.zeros(rows, np.int64))
    offsets = pa.array(np.arange(0, _BINS * rows + 1, _BINS, dtype=np.int32))
    for name, kind in (("histogram_bins", np.int16), ("histogram_counts", np.int64)):
        held = np.resize(np.arange(_BINS, dtype=kind) + 1, _BINS * rows)
        lists = pa.ListArray.from_arrays(offsets, pa.array(held))
        table = table.set_column(table.schema.get_field_index(name), name, lists)
    return _written(table, **options)


def swapped_columns(whole: bytes) -> bytes:
    """A segment in whose footer a column of long text and a short one, which is not read, have swapped their paths."""
    table = pq.read_table(pa.BufferReader(whole)).slice(0, 1)
    place = table.schema.get_field_index("tensor")
    name = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), pa.array(["n" * _LONGEST_NAME]))
    named = table.set_column(place, "tensor", name).append_column("lesser", table.column(place))
    data = _written(named, dictionary_pagesize_limit=2**31 - 1, write_statistics=["step"])
    size = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - size], data[-8 - size :]
    # A list of one text, which only paths are.
    long, short, other = b"\x19\x18\x06tensor", b"\x19\x18\x06lesser", b"\x19\x18\x06??????"
    assert footer.count(long) == footer.count(short) == 1
    return body + footer.replace(long, other).replace(short, long).replace(other, short)


def row_group_bombs(whole: bytes) -> list[bytes]:
    """Segments whose one row group claims more rows than the file, which Arrow would reserve memory for."""
    sink = io.BytesIO()
    pq.write_table(pq.read_table(pa.BufferReader(whole)).slice(0, 5), sink, compression="zstd")
    data = sink.getvalue()
    size = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - size], data[-8 - size : -8]
    # After the row group's bytes (field 2) come its rows (field 3), 5 of them in Thrift's zigzag form.
    place = footer.rindex(b"\x16\x0a")
    bombs = []
    for rows in (2**24, 2**31, 2**36, 2**62):
        claim = b"\x16" + _varint(2 * rows)
        # Alone; and with the true number after it in field 3 of another type, or before it in field 3 + 2**16: Thrift takes the claim.
        for rest in (claim, claim + b"\x05\x06\x0a", b"\x16\x0a\x06\x86\x80\x08" + claim[1:]):
            bent = footer[:place] + rest + footer[place + 2 :]
            bombs.append(body + bent + len(bent).to_bytes(4, "little") + b"PAR1")
    return bombs


def _varint(value: int) -> bytes:
    held = bytearray()
    while value > 127:
        held.append(value & 127 | 128)
        value >>= 7
    return bytes([*held, value])


def _written(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", compression_level=19, **options)
    return sink.getvalue()


def manifest_bombs(whole: bytes) -> list[bytes]:
    """Manifests of which one compacted segment names the longest tensor of its catalogue very often."""
    manifest = json.loads(whole)
    (attempt, *_) = manifest["attempts"]
    catalogue = json.loads(zlib.decompress(base64.b64decode(attempt["catalogue"])))
    packed = base64.b64encode(zlib.compress(json.dumps([{**catalogue[0], "name": "n" * 4096}]).encode()))
    segment = {**attempt["segments"][0], "tensors": [[0, 1]] * 900_000}
    attempt = {**attempt, "catalogue": packed.decode(), "segments": [segment], "recent": None}
    return [json.dumps({**manifest, "attempts": [attempt]}, separators=(",", ":")).encode()]


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
        {"__metadata__": "no", "a": entry},
        {"__metadata__": {"watchstep.missing_names": "[" + "[]," * 5_000_000 + "[]]"}, "a": entry},
        {"a": {**entry, "shape": [[]] * 5_000_000}},
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
        b"[" + b"[]," * 5_000_000 + b"[]]",
        b'{"version": 1, "x": [' + b'{"a":1},' * 5_000_000 + b"{}]}",
        b'{"a":' * 100_000,
        b'{"version": ' + b"9" * 100_000 + b"}",
        b'{"version": 1e999999}',
        b'{"version": NaN}',
        b'{"snapshots": [' + b'{"id":"x","step":1},' * 50_000 + b"]}",
        b"\xff\xfe" + dice.randbytes(1000),
        json.dumps({"version": 1, "cadence": [["x" * 1_000_000, 1]]}).encode(),
    ]
