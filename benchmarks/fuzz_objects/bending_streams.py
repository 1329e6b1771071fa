"""Ways to bend a segment that leave it two valid streams of Arrow IPC: what their bytes cannot tell, its reader must."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa

from benchmarks.fuzz_objects.bending import Bend
from tests.sdk.format.arrow_streams import Streams

_NUMBERS = (0, 1, -1, 2**7 - 1, 2**15, 2**31 - 1, 2**31, 2**48, 2**53, 2**62, -(2**63), 2**63 - 1)
_FLOATS = (0.0, -0.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan"), 5e-324)
_FACTS: tuple[Any, ...] = (
    *_NUMBERS, *_FLOATS, 2**63, 10**30, None, True, "1", "9" * 5000, "x", [], {}, [[]] * 9
)  # fmt: skip

_StreamBend = Callable[[random.Random, Streams], Streams]


def _bend(change: _StreamBend) -> Bend:
    """Return a bend of bytes, which are written again by pyarrow, sometimes with other options."""

    def bent(dice: random.Random, whole: bytes) -> bytes:
        compression = dice.choice(("lz4", "lz4", "lz4", None, "zstd"))
        return change(dice, Streams.read(whole)).encode(compression=compression)

    return bent


def values_changed(dice: random.Random, streams: Streams) -> Streams:
    """Some values of one column made others of its type."""
    name = dice.choice([*streams.columns])
    column = streams.columns[name]
    return streams.with_column(name, _changed(dice, column))


def _changed(dice: random.Random, column: Any) -> Any:
    values = column.to_pylist()
    choices = _FLOATS if pa.types.is_floating(column.type) else _NUMBERS
    for _ in range(dice.choice((1, 1, 5, len(values)))):
        values[dice.randrange(len(values))] = dice.choice(choices)
    try:
        return pa.array(values, column.type)
    except (pa.ArrowInvalid, OverflowError):
        return pa.nulls(len(values), column.type)


def histograms_changed(dice: random.Random, streams: Streams) -> Streams:
    """Some bins, counts or lengths made others; or a column left out, or of another type."""
    turned = dice.random()
    if turned < 0.3:
        return streams.with_column("histogram_length", _changed(dice, streams.columns["histogram_length"]))
    name = dice.choice([*streams.histograms])
    if turned < 0.8:
        column = _changed(dice, streams.histograms[name])
    else:
        column = streams.histograms[name].cast(pa.int32())
    changed = {**streams.histograms, name: column}
    if turned > 0.9:
        del changed[name]
    return replace(streams, histograms=changed)


def column_changed(dice: random.Random, streams: Streams) -> Streams:
    """A column left out, of another type, or one more."""
    name = dice.choice([*streams.columns, *streams.facts["constant"]])
    rows = len(streams.columns["step"])
    kind = dice.choice(
        (pa.null(), pa.string(), pa.int8(), pa.int64(), pa.uint64(), pa.float32(), pa.float64(), pa.list_(pa.float64()),
         pa.dictionary(pa.int32(), pa.string()), pa.binary(16), pa.bool_())
    )  # fmt: skip
    turned = dice.random()
    if turned < 0.3:
        return streams.without(name)
    if turned < 0.5:
        return streams.with_column(
            f"{dice.choice(('later', 'probe.x', 'probe.' + 'x' * 5000))}", [1.0] * rows
        )
    return streams.with_column(name, pa.nulls(rows, kind) if turned < 0.7 else _zeros(rows, kind))


def _zeros(rows: int, kind: Any) -> Any:
    try:
        return pa.array([0] * rows, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError):
        return pa.nulls(rows, kind)


def rows_changed(dice: random.Random, streams: Streams) -> Streams:
    """Rows in another order, twice, or none."""
    rows = len(streams.columns["step"])
    count = 0 if dice.random() < 0.2 else dice.choice((1, rows, 2 * rows))
    order = pa.array([dice.randrange(rows) for _ in range(count)], pa.int64())
    return replace(streams, columns={name: column.take(order) for name, column in streams.columns.items()})


def facts_changed(dice: random.Random, streams: Streams) -> Streams:
    """A fact, or a constant, left out or made another; their checksum is right."""
    facts = json.loads(json.dumps(streams.facts))
    changed = facts if dice.random() < 0.5 else facts["constant"]
    name = dice.choice([*changed])
    if dice.random() < 0.2:
        del changed[name]
    else:
        changed[name] = dice.choice(_FACTS)
    if not isinstance(facts.get("constant"), dict):
        facts["constant"] = {"step": 1}
    return replace(streams, facts=facts)


def metadata_changed(dice: random.Random, streams: Streams) -> Streams:
    """What a stream says of itself left out, emptied or made something else."""
    changed = dict(streams.metadata)
    key = dice.choice(sorted(changed))
    turned = dice.random()
    if turned < 0.2:
        del changed[key]
    elif turned < 0.6:
        changed[key] = dice.choice(
            (b"", b"null", b"[]", b"{}", b"-1", b"99", b"\xff", json.dumps([[]] * 9).encode())
        )
    elif turned < 0.8:
        changed = {
            **changed,
            **{b"k%d" % number: b"v" for number in range(dice.choice((1, 13, 14, 15, 500)))},
        }
    else:
        text = bytearray(changed[key] or b"0")
        text[dice.randrange(len(text))] = dice.randrange(256)
        changed[key] = bytes(text)
    return replace(streams, metadata=changed)


STREAM_BENDS: tuple[Bend, ...] = tuple(
    _bend(change)
    for change in (
        values_changed,
        values_changed,
        histograms_changed,
        column_changed,
        rows_changed,
        facts_changed,
        facts_changed,
        metadata_changed,
    )
)
