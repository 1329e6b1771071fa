"""What must hold of a segment before memory is taken for it, and of its figures before anything counts on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from watchstep.block import Block
from watchstep.histogram import BIN_RANGE, Histograms, UnreadHistograms
from watchstep.parquet_claims import Claims
from watchstep.statistics import COUNT_COLUMNS, VALUE_COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa

MAX_BYTES = 256 * 1024 * 1024
"""Largest segment, compressed or not, that a reader takes."""

MAX_ROWS = 1_000_000
"""Most rows of one segment; with their columns they are some 250 MB."""

HISTOGRAM_COLUMNS = frozenset({"histogram_bins", "histogram_counts"})

PROBE = "probe."
"""Prefix of a probe's column."""

_MAX_PROBES = 64
_MAX_BINS = 32 * MAX_ROWS
_MAX_WORKER = 2**28 - 1  # what `Block.series_key` has room for
_MAX_COUNT = 2**48  # elements; sums of whole segments stay within int64


def checked_columns(schema: pa.Schema) -> list[str]:
    """The columns to read, each of its type; what a later version adds beside them is left out."""
    due = _column_types()
    probes = [name for name in schema.names if name.startswith(PROBE)]
    if len(probes) > _MAX_PROBES:
        raise ValueError(f"{len(probes)} probes, at most {_MAX_PROBES} are read")
    due.update(dict.fromkeys(probes, due["mean"]))
    for name, kinds in due.items():
        kind = schema.field(name).type
        if not any(kind.equals(allowed) for allowed in kinds):
            raise ValueError(f"column {name[:80]} is of type {str(kind)[:80]}")
    return list(due)


def _column_types() -> dict[str, tuple[Any, ...]]:
    import pyarrow as pa

    words = (pa.dictionary(pa.int32(), pa.string()), pa.string())
    whole, short = (pa.int64(),), (pa.int32(),)
    return {
        **dict.fromkeys(("mode", "tensor", "stage"), words),
        **dict.fromkeys(("step", "time_ns", *COUNT_COLUMNS), whole),
        **dict.fromkeys(("worker", "shard_index", "shard_count", "replica"), short),
        **dict.fromkeys(VALUE_COLUMNS, (pa.float64(),)),
        "histogram_bins": (pa.list_(pa.int16()),),
        "histogram_counts": (pa.list_(pa.int64()),),
    }


def check_claims(claims: Claims, columns: list[str]) -> None:
    """Hold what a file says of its sizes against the limits, before anything is unpacked.

    Raises:
        ValueError: with what is over them.
    """
    values = dict.fromkeys(columns, 0)
    size = 0
    for claim in claims.columns:
        name = claim.path.removesuffix(".list.element")
        if name in values:
            values[name] += claim.values
            size += claim.pages
    if not 0 <= claims.rows <= MAX_ROWS or size > MAX_BYTES:
        raise ValueError(f"claims {claims.rows} rows and {size} bytes, over the limits")
    for name, number in values.items():
        if number > _MAX_BINS if name in HISTOGRAM_COLUMNS else number != claims.rows:
            raise ValueError(f"column {name[:80]} claims {number} values for {claims.rows} rows")


def check_values(block: Block) -> Block:
    """The same block, if its figures are such as a tensor can have.

    Raises:
        ValueError: with the column's name.
    """
    held, places = block.statistics, block.places
    _within("step", block.step, 0)
    _within("worker", block.worker, 0, _MAX_WORKER)
    _within("replica", places.replica, 0)
    _within("shard_count", places.shard_count, 1)
    _within("shard_index", places.shard_index, 0)
    _within("shard_index", places.shard_count - places.shard_index, 1)
    for name in COUNT_COLUMNS:
        _within(name, getattr(held, name), 0, _MAX_COUNT)
    _within("count", held.finite - held.zero - held.negative, 0)
    if not isinstance(held.histogram, UnreadHistograms):
        _check_histograms(held.histogram)
    return block


def _within(name: str, values: NDArray[Any], least: int, most: int | None = None) -> None:
    if (values < least).any() or (most is not None and (values > most).any()):
        raise ValueError(f"column {name} holds a number that cannot be")


def _check_histograms(histogram: Histograms) -> None:
    _within("histogram_bins", histogram.bins, *BIN_RANGE)
    _within("histogram_counts", histogram.counts, 1, _MAX_COUNT)
    starts = np.zeros(len(histogram.bins) + 1, np.bool_)
    starts[histogram.offsets] = True
    if (np.diff(histogram.bins.astype(np.int32)) <= 0)[~starts[1:-1]].any():
        raise ValueError("column histogram_bins is not in ascending order")
