"""Segments as Parquet tables: conversion from and to blocks, and checks of a file's claims before memory is allocated.

A file's rows are those of a `Block`, and its metadata contain the catalogue of its tensors, so that every file can be read independently,
by Watchstep or any other reader of Parquet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from watchstep.format.block import STAGES, Block, Places, from_codes, from_numbers, to_numbers, to_places
from watchstep.format.parquet.claims import Claims, ColumnClaim
from watchstep.format.segment_checks import (
    HISTOGRAM_COLUMNS,
    LIMITS,
    MAX_BINS,
    MAX_BYTES,
    MAX_PROBES,
    MAX_ROWS,
    PROBE,
    WORD_COLUMNS,
    check_histograms,
    check_values,
    whole,
)
from watchstep.format.statistics import (
    COUNT_COLUMNS,
    VALUE_COLUMNS,
    Histograms,
    StatisticsBatch,
    UnreadHistograms,
)
from watchstep.format.tensors import MAX_WORD_BYTES, MODES, TensorInfo, check_word

if TYPE_CHECKING:
    import pyarrow as pa


_WORD_ENCODINGS = frozenset({0, 2, 8})
"""Parquet's plain and dictionary encodings, whose pages are as large as their text. Others share prefixes: few bytes, much text."""
_LENGTH_BYTES = 4  # before each text in a page
_PLACE_BYTES = 4  # of a text's place in the dictionary, in each row
_NUMBER_BYTES = 8
_PAGE_SLACK = 1024  # what a page holds besides its values
_BIN_BYTES = 4  # int16, which Parquet holds as int32


def checked_columns(schema: pa.Schema) -> list[str]:
    """Return the columns to read, with checked types. Additional columns of later versions are omitted."""
    due = _column_types()
    probes = [name for name in schema.names if name.startswith(PROBE)]
    if len(probes) > MAX_PROBES:
        raise ValueError(f"{len(probes)} probes, at most {MAX_PROBES} are read")
    for name in probes:
        check_word("probe", name)
    due.update(dict.fromkeys(probes, due["mean"]))
    for name, kinds in due.items():
        kind = schema.field(name).type
        if not any(kind.equals(allowed) for allowed in kinds):
            raise ValueError(f"column {name[:80]} is of type {str(kind)[:80]}")
    return list(due)


def _column_types() -> dict[str, tuple[Any, ...]]:
    import pyarrow as pa

    words = (pa.dictionary(pa.int32(), pa.string()),)
    whole, short = (pa.int64(),), (pa.int32(),)
    return {
        **dict.fromkeys(WORD_COLUMNS, words),
        **dict.fromkeys(("step", "time_ns", *COUNT_COLUMNS), whole),
        **dict.fromkeys(("worker", "shard_index", "shard_count", "replica"), short),
        **dict.fromkeys(VALUE_COLUMNS, (pa.float64(),)),
        "histogram_bins": (pa.list_(pa.int16()),),
        "histogram_counts": (pa.list_(pa.int64()),),
    }


def check_leaves(leaves: list[tuple[str, ...]]) -> None:
    """Check that the read columns are a segment's own, and those of histograms are list elements.

    pyarrow reads all columns with a path that begins with a requested name.

    Raises:
        ValueError: Another column would be read; the message has its path.
    """
    due: dict[str, tuple[str, ...]] = {
        name: (name,) for name in (*WORD_COLUMNS, *LIMITS, *VALUE_COLUMNS, "time_ns")
    }
    due.update({name: (name, "list", "element") for name in HISTOGRAM_COLUMNS})
    for leaf in leaves:
        path = ".".join(leaf)
        if leaf != due.get(path.split(".", 1)[0], leaf) or (path.startswith(PROBE) and len(leaf) > 1):
            raise ValueError(f"column {path[:80]} is not one of a segment's")
    if len({*leaves}) != len(leaves):
        raise ValueError("two columns have the same name")


def check_claims(claims: Claims, columns: list[str]) -> None:
    """Check a file's claimed sizes against the limits before decompression.

    A column counts with its decompressed pages, or with its values in memory if that is more: a page of a few
    bytes can represent millions of values, by run lengths and dictionaries.

    Raises:
        ValueError: A size exceeds a limit.
    """
    values = dict.fromkeys(columns, 0)
    size = 0
    for claim in claims.columns:
        name = claim.path.removesuffix(".list.element")
        if name in values:
            values[name] += claim.values
        size += _claimed_size(name, claim)
    if not 0 <= claims.rows <= MAX_ROWS or size > MAX_BYTES:
        raise ValueError(f"claims {claims.rows} rows and {size} bytes, over the limits")
    for name, number in values.items():
        if number > MAX_BINS if name in HISTOGRAM_COLUMNS else number != claims.rows:
            raise ValueError(f"column {name[:80]} claims {number} values for {claims.rows} rows")


def _claimed_size(name: str, claim: ColumnClaim) -> int:
    """Return the bytes of memory that a column's part of one row group claims."""
    if name not in WORD_COLUMNS:
        width = _BIN_BYTES if name == "histogram_bins" else _NUMBER_BYTES
        return max(claim.pages, claim.dictionary_pages + claim.values * width)
    if not claim.encodings <= _WORD_ENCODINGS:
        raise ValueError(f"column {name} has encodings {sorted(claim.encodings)}, which are not read")
    most = _LENGTH_BYTES + MAX_WORD_BYTES
    if claim.dictionary_pages > claim.dictionary_values * most:
        raise ValueError(
            f"column {name} claims {claim.dictionary_pages} bytes for {claim.dictionary_values} texts,"
            f" each of {MAX_WORD_BYTES} at most"
        )
    if claim.pages - claim.dictionary_pages > claim.values * (most + _PLACE_BYTES) + _PAGE_SLACK:
        raise ValueError(
            f"column {name} claims {claim.pages} bytes for {claim.values} texts, each of {MAX_WORD_BYTES} at most"
        )
    return claim.pages + claim.values * _PLACE_BYTES


def to_table(block: Block) -> pa.Table:
    """Return the rows as an Arrow table as in a segment, with one column per figure, and histograms if they were read."""
    import pyarrow as pa

    statistics = block.statistics
    columns: dict[str, Any] = {
        "step": from_numbers(block.step),
        "mode": from_codes(block.mode, MODES),
        "worker": from_numbers(block.worker),
        "tensor": from_codes(block.tensor, [info.name for info in block.catalogue]),
        "time_ns": from_numbers(block.time_ns),
        "shard_index": from_numbers(block.places.shard_index),
        "shard_count": from_numbers(block.places.shard_count),
        "replica": from_numbers(block.places.replica),
        "stage": from_codes(block.places.stage, STAGES),
    }
    columns.update({name: from_numbers(getattr(statistics, name)) for name in COUNT_COLUMNS})
    columns.update(
        {name: from_numbers(getattr(statistics, name), nan_is_null=True) for name in VALUE_COLUMNS}
    )
    columns.update(histogram_columns(statistics.histogram))
    columns.update(
        {PROBE + name: from_numbers(column, nan_is_null=True) for name, column in block.probes.items()}
    )
    return pa.table(columns)


def histogram_columns(histograms: Histograms) -> dict[str, Any]:
    """Return the columns of the histograms, without any if they were not read."""
    import pyarrow as pa

    if isinstance(histograms, UnreadHistograms):
        return {}
    offsets = from_numbers(histograms.offsets.astype(np.int32))
    return {
        "histogram_bins": pa.ListArray.from_arrays(offsets, from_numbers(histograms.bins)),
        "histogram_counts": pa.ListArray.from_arrays(offsets, from_numbers(histograms.counts)),
    }


def to_block(table: pa.Table, catalogue: tuple[TensorInfo, ...], name: str) -> Block:
    """Convert a table with all columns of a segment to a block.

    Raises:
        FormatError: A figure or word is not valid in a segment.
    """
    with whole(name):
        return check_values(_to_block(table, catalogue))


def _to_block(chunked: pa.Table, catalogue: tuple[TensorInfo, ...]) -> Block:
    table = chunked.combine_chunks()
    places = {info.name: place for place, info in enumerate(catalogue)}
    if len(places) != len(catalogue):
        raise ValueError("two of its tensors have the same name")
    statistics = StatisticsBatch(
        **{name: _ints(table, name, np.int64) for name in COUNT_COLUMNS},
        **{name: _floats(table, name) for name in VALUE_COLUMNS},
        histogram=_histograms(table),
    )
    return Block(
        step=_ints(table, "step", np.int64),
        mode=to_places(
            table.column("mode"), {mode: place for place, mode in enumerate(MODES)}, np.int8, "mode"
        ),
        worker=_ints(table, "worker", np.int32),
        time_ns=_ints(table, "time_ns", np.int64),
        tensor=to_places(table.column("tensor"), places, np.int32, "tensor"),
        catalogue=catalogue,
        places=Places(
            _ints(table, "shard_index", np.int32),
            _ints(table, "shard_count", np.int32),
            _ints(table, "replica", np.int32),
            to_places(
                table.column("stage"), {stage: place for place, stage in enumerate(STAGES)}, np.int8, "stage"
            ),
        ),
        statistics=statistics,
        probes={
            name[len(PROBE) :]: _floats(table, name) for name in table.column_names if name.startswith(PROBE)
        },
    )


def _ints(table: Any, name: str, dtype: Any) -> Any:
    column = table.column(name)
    if column.null_count:
        raise ValueError(f"column {name} has nulls")
    return np.ascontiguousarray(to_numbers(column).astype(dtype, casting="same_kind"))


def _floats(table: Any, name: str) -> Any:
    return np.ascontiguousarray(to_numbers(table.column(name)).astype(np.float64))


def histograms_of(table: pa.Table) -> Histograms:
    """Return the histograms of some rows of a segment.

    Raises:
        ValueError: They are not valid.
    """
    histograms = _histograms(table)
    check_histograms(histograms)
    return histograms


def _histograms(table: Any) -> Histograms:
    import pyarrow as pa

    if not HISTOGRAM_COLUMNS & {*table.column_names}:
        return UnreadHistograms(len(table))
    empty = pa.ListArray.from_arrays(from_numbers(np.zeros(1, np.int32)), from_numbers(np.empty(0, np.int64)))
    parts = [
        pa.concat_arrays(column.chunks) if column.num_chunks else empty
        for column in (table.column("histogram_bins"), table.column("histogram_counts"))
    ]
    bins, counts = parts
    offsets = to_numbers(bins.offsets).astype(np.int64)
    if not np.array_equal(offsets, to_numbers(counts.offsets)):
        raise ValueError("histogram columns do not match")
    first, last = int(offsets[0]), int(offsets[-1])
    return Histograms(
        offsets - first,
        to_numbers(bins.values)[first:last].astype(np.int16, copy=False),
        to_numbers(counts.values)[first:last].astype(np.int64, copy=False),
    )
