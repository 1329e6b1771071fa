"""Runs of schema 1, written object by object with the names of that schema, without the writers of this version."""

from __future__ import annotations

import base64
import io
import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

BLOCK = 4 * 1024 * 1024
COUNTS = ("count", "nan", "pos_inf", "neg_inf", "zero", "negative")
VALUES = ("min", "max", "abs_min", "mean", "m2", "abs_sum", "square_sum")

STALE = "gradients:kept"
OUTSIDE = "fc.weight:unheld"
TENSORS = (
    {"name": STALE, "collections": ["metrics"], "role": "metric"},
    {"name": OUTSIDE, "collections": ["gradients", "unheld"], "role": "unheld", "module": "fc", "shape": [2]},
)


def segment(steps: range, probes: dict[str, float] | None = None) -> bytes:
    """A segment with both tensors at each step; the metric is 1, and the gradient has the probes of parameters in no optimizer."""
    return _parquet(_table([(step, tensor) for step in steps for tensor in range(len(TENSORS))], probes))


def _table(rows: list[tuple[int, int]], probes: dict[str, float] | None = None) -> pa.Table:
    size = len(rows)
    names = pa.array([info["name"] for info in TENSORS])
    zeros, ones = [0] * size, [1.0] * size
    columns: dict[str, Any] = {
        "step": pa.array([step for step, _ in rows], pa.int64()),
        "mode": pa.array(["train"] * size).dictionary_encode(),
        "worker": pa.array(zeros, pa.int32()),
        "tensor": pa.DictionaryArray.from_arrays(pa.array([tensor for _, tensor in rows], pa.int32()), names),
        "time_ns": pa.array([10 + step for step, _ in rows], pa.int64()),
        "shard_index": pa.array(zeros, pa.int32()),
        "shard_count": pa.array([1] * size, pa.int32()),
        "replica": pa.array(zeros, pa.int32()),
        "stage": pa.array(["local"] * size).dictionary_encode(),
        **{name: pa.array([int(name == "count")] * size, pa.int64()) for name in COUNTS},
        **{name: pa.array([0.0] * size if name == "m2" else ones, pa.float64()) for name in VALUES},
        "histogram_bins": pa.array([[1000]] * size, pa.list_(pa.int16())),
        "histogram_counts": pa.array([[1]] * size, pa.list_(pa.int64())),
    }
    default = {"was_held": 1.0, "held_share": 0.5, "after_held": 0.0, "beside_held": 0.0, "changed": 0.0}
    for name, value in (default if probes is None else probes).items():
        numbers = [value if tensor == 1 else None for _, tensor in rows]
        columns[f"probe.{name}"] = pa.array(numbers, pa.float64())
    return pa.table(columns)


def _catalogue() -> bytes:
    rest = {"module_type": "", "order": 0, "dtype": "float32", "optimizer": "", "derived": False}
    entries = [rest | {"module": "", "shape": []} | info for info in TENSORS]
    return base64.b64encode(zlib.compress(json.dumps(entries).encode()))


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    meta = {b"watchstep": b'{"schema": 1}', b"watchstep.tensors": _catalogue(), b"watchstep.blocks": b"{}"}
    words = ["mode", "tensor", "stage"]
    pq.write_table(table.replace_schema_metadata(meta), sink, use_dictionary=words, write_page_checksum=True)
    return sink.getvalue()


def write_run(folder: Path, steps: int = 12, *, compacted: bool = False, ended: bool = True) -> Path:
    """A run ``vision/first`` with one attempt and two segments, or the same rows compacted; its folder."""
    run = folder / "vision" / "first"
    documents: dict[str, Any] = {
        "run.json": {
            "project": "vision",
            "run": "first",
            "created_ns": 1,
            "rules": [
                {"rule": "missing_zero_grad", "tensors": {"include": ".*gradients:kept(_2)?"}},
                {"rule": "tensor_variance", "tensors": {"collection": "unheld", "include": "fc.*:unheld"}},
                {"sql": 'SELECT step FROM statistics WHERE "probe.was_held" > 0'},
            ],
            "config": {"collections": {"unheld": {"cadence": {"every": 25}}}, "probes": ["kept_gradients"]},
            "environment": {"note": "unheld"},
            "schema": 1,
        },
        "attempts/a1.json": {"attempt": "a1", "started_ns": 2, "world_size": 1},
        "control.json": {"version": 3, "stop": None, "snapshots": [], "cadence": [["unheld", 50]]},
        "journal/a1/0.json": {
            "schema": 1,
            "attempt": "a1",
            "number": 0,
            "writers": [["node", "w0"]],
            "evaluations": [
                [0, 5, steps - 1, True, [[0, 0, 0, steps // 2 - 1, [[0, 0, steps // 2 - 1, steps]]]]]
            ],
        },
    }
    if ended:
        documents["end/a1/0.json"] = {
            "worker": 0,
            "state": "completed",
            "last_step": steps - 1,
            "ended_ns": 99,
            "segments": 2,
            "writer": "w0",
            "reason": "unheld",
            "health": {"faults": {"kept gradients": "no"}, "overhead": {"seconds": {"unheld": 0.1}}},
        }
    for key, document in documents.items():
        _write(run / key, json.dumps(document).encode())
    half = steps // 2
    if compacted:
        _compact(run, steps)
    else:
        _write(run / f"stats/a1/node/w0/{0:010d}-0-{half - 1}.parquet", segment(range(half)))
        _write(run / f"stats/a1/node/w0/{1:010d}-{half}-{steps - 1}.parquet", segment(range(half, steps)))
    return run


def compressed_snapshot(
    dtype: str, shape: tuple[int, ...], data: bytes, lie: dict[str, object] | None = None
) -> bytes:
    """A snapshot of a tensor ``w``, compressed by byte planes, and of an uncompressed tensor ``plain``; ``lie`` replaces its description."""
    size = len(data) // math.prod(shape) if math.prod(shape) else 1
    blocks = []
    for start in range(0, len(data), BLOCK):
        raw = data[start : start + BLOCK]
        planes = b"".join(raw[plane::size] for plane in range(size))
        packed: bytes = pa.Codec("zstd").compress(planes, asbytes=True)
        blocks.append(packed if len(packed) < len(raw) else raw)
    body = b"".join(blocks)
    description = {"codec": "planes-zstd", "dtype": dtype, "shape": list(shape), "block": BLOCK}
    description |= {"blocks": [len(block) for block in blocks]} | (lie or {})
    header = json.dumps(
        {
            "__metadata__": {"step": "3", "watchstep.compressed": json.dumps({"w": description})},
            "w": {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]},
            "plain": {"dtype": "U8", "shape": [4], "data_offsets": [len(body), len(body) + 4]},
        }
    ).encode()
    return struct.pack("<Q", len(header)) + header + body + b"abcd"


def _compact(run: Path, steps: int) -> None:
    table = _table([(step, tensor) for tensor in range(len(TENSORS)) for step in range(steps)])
    data = _parquet(table)
    key = f"compacted/{1:010d}/a1/000000.parquet"
    _write(run / key, data)
    part = {
        "key": key,
        "size": len(data),
        "first": 0,
        "last": steps - 1,
        "tensors": [[tensor, steps] for tensor in range(len(TENSORS))],
        "columns": table.column_names,
        "constant": {"mode": 0, "worker": 0, "shard_index": 0, "shard_count": 1, "replica": 0, "stage": 0},
    }
    attempt = {
        "attempt": "a1",
        "started_ns": 10,
        "catalogue": _catalogue().decode(),
        "parts": [part],
        "recent": None,
    }
    manifest = {"generation": 1, "created_ns": 50, "sources": [], "attempts": [attempt], "schema": 1}
    _write(run / f"compacted/{1:010d}/claim.json", b'{"created_ns": 40}')
    _write(run / f"compacted/{1:010d}/manifest.json", json.dumps(manifest).encode())


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
