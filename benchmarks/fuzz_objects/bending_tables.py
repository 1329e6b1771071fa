"""Ways to bend a compacted segment that leave it a valid Parquet file: what its bytes cannot tell, its reader must."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.fuzz_objects.bending import Bend

_NUMBERS = (0, 1, -1, 2**15, 2**31 - 1, 2**31, 2**48, 2**53, 2**62, -(2**63), 2**63 - 1)
_FLOATS = (0.0, -0.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan"), 5e-324)


def _read(whole: bytes) -> pa.Table:
    return pq.read_table(pa.BufferReader(whole))


def _written(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def value_changed(dice: random.Random, whole: bytes) -> bytes:
    """Some values of one column made others of its type."""
    table = _read(whole)
    name = dice.choice(table.schema.names)
    column = table[name].combine_chunks()
    held = column.to_pylist()
    for _ in range(dice.choice((1, 1, 5, len(held)))):
        held[dice.randrange(len(held))] = _other(dice, column.type)
    try:
        bent = pa.array(held, column.type)
    except (pa.ArrowInvalid, OverflowError):
        bent = pa.nulls(len(held), column.type)
    return _written(table.set_column(table.schema.get_field_index(name), name, bent))


def _other(dice: random.Random, kind: Any) -> Any:
    if pa.types.is_floating(kind):
        return dice.choice(_FLOATS)
    if pa.types.is_integer(kind):
        return dice.choice(_NUMBERS)
    if pa.types.is_list(kind):
        return [_other(dice, kind.value_type) for _ in range(dice.choice((0, 1, 3, 700)))]
    return dice.choice((None, "", "x" * 10_000, "\0", "0.weight:gradient", "../../etc"))


def column_changed(dice: random.Random, whole: bytes) -> bytes:
    """A column left out, twice, empty, or of another type."""
    table = _read(whole)
    place = dice.randrange(table.num_columns)
    name = table.schema.names[place]
    kind = dice.choice((pa.null(), pa.string(), pa.int8(), pa.float32(), pa.list_(pa.float64()), pa.binary()))
    turned = dice.random()
    if turned < 0.3:
        return _written(table.remove_column(place))
    if turned < 0.5:
        return _written(table.append_column(name, table[name]))
    return _written(table.set_column(place, name, pa.nulls(len(table), kind)))


def rows_changed(dice: random.Random, whole: bytes) -> bytes:
    """Rows in another order, twice, or none."""
    table = _read(whole)
    if dice.random() < 0.2:
        return _written(table.slice(0, 0))
    order = [dice.randrange(len(table)) for _ in range(dice.choice((1, len(table), 2 * len(table))))]
    return _written(table.take(order))


def metadata_changed(dice: random.Random, whole: bytes) -> bytes:
    """What the file says of itself left out, emptied or made something else."""
    table = _read(whole)
    held = dict(table.schema.metadata or {})
    key = dice.choice(sorted(held))
    turned = dice.random()
    if turned < 0.3:
        del held[key]
    elif turned < 0.7:
        held[key] = dice.choice(
            (b"", b"null", b"[]", b"{}", b"-1", b"99", b"\xff", json.dumps([[]] * 9).encode())
        )
    else:
        text = bytearray(held[key] or b"0")
        text[dice.randrange(len(text))] = dice.randrange(256)
        held[key] = bytes(text)
    return _written(table.replace_schema_metadata(held))


TABLE_BENDS: tuple[Bend, ...] = (value_changed, value_changed, column_changed, rows_changed, metadata_changed)
