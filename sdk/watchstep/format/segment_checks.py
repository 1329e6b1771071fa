"""What must hold of a segment before memory is taken for it, and of its figures before anything counts on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep.format.histogram import BIN_RANGE, Histograms, UnreadHistograms
from watchstep.format.parquet_claims import Claims, ColumnClaim
from watchstep.format.statistics import COUNT_COLUMNS, VALUE_COLUMNS
from watchstep.format.tensors import MAX_WORD_BYTES, check_word

if TYPE_CHECKING:
    import pyarrow as pa

MAX_BYTES = 256 * 1024 * 1024
"""Largest segment, compressed or not, that a reader takes."""

MAX_ROWS = 1_000_000
"""Most rows of one segment; with their columns they are some 250 MB."""

HISTOGRAM_COLUMNS = frozenset({"histogram_bins", "histogram_counts"})

PROBE = "probe."
"""Prefix of a probe's column."""

WORD_COLUMNS = ("mode", "tensor", "stage")
"""Columns of text. Readers take them as places in a dictionary, so that no row holds a copy of its text."""

_MAX_PROBES = 64
_MAX_BINS = 32 * MAX_ROWS
_MAX_WORKER = 2**28 - 1  # what `Block.series_key` has room for
_MAX_COUNT = 2**48  # elements; sums of whole segments stay within int64
_LIMITS: dict[str, tuple[int, int | None]] = {
    "step": (0, None),
    "worker": (0, _MAX_WORKER),
    "replica": (0, None),
    "shard_count": (1, None),
    "shard_index": (0, None),
    **dict.fromkeys(COUNT_COLUMNS, (0, _MAX_COUNT)),
}
_WORD_ENCODINGS = frozenset({0, 2, 8})
"""Parquet's plain and dictionary encodings, whose pages are as large as their text. Others share prefixes: few bytes, much text."""
_LENGTH_BYTES = 4  # before each text in a page
_PLACE_BYTES = 4  # of a text's place in the dictionary, in each row
_NUMBER_BYTES = 8
_PAGE_SLACK = 1024  # what a page holds besides its values
_BIN_BYTES = 4  # int16, which Parquet holds as int32


def checked_columns(schema: pa.Schema) -> list[str]:
    """The columns to read, each of its type; what a later version adds beside them is left out."""
    due = _column_types()
    probes = [name for name in schema.names if name.startswith(PROBE)]
    if len(probes) > _MAX_PROBES:
        raise ValueError(f"{len(probes)} probes, at most {_MAX_PROBES} are read")
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
    """See that what is read of a segment is columns of its own, and of histograms the elements of lists.

    pyarrow reads all whose path begins with a name that is asked for.

    Raises:
        ValueError: with the path of another.
    """
    due: dict[str, tuple[str, ...]] = {
        name: (name,) for name in (*WORD_COLUMNS, *_LIMITS, *VALUE_COLUMNS, "time_ns")
    }
    due.update({name: (name, "list", "element") for name in HISTOGRAM_COLUMNS})
    for leaf in leaves:
        path = ".".join(leaf)
        if leaf != due.get(path.split(".", 1)[0], leaf) or (path.startswith(PROBE) and len(leaf) > 1):
            raise ValueError(f"column {path[:80]} is not one of a segment's")
    if len({*leaves}) != len(leaves):
        raise ValueError("two columns have one name")


def check_claims(claims: Claims, columns: list[str]) -> None:
    """Hold what a file says of its sizes against the limits, before anything is unpacked.

    A column counts with its unpacked pages, or with its values as they are in memory where that is more: a page of a few
    bytes can stand for millions of values, by run lengths and dictionaries.

    Raises:
        ValueError: with what is over them.
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
        if number > _MAX_BINS if name in HISTOGRAM_COLUMNS else number != claims.rows:
            raise ValueError(f"column {name[:80]} claims {number} values for {claims.rows} rows")


def _claimed_size(name: str, claim: ColumnClaim) -> int:
    """Bytes of memory that a column's part of one row group claims."""
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


def check_values(block: Block) -> Block:
    """The same block, if its figures are such as a tensor can have.

    Raises:
        ValueError: with the column's name.
    """
    held = block.statistics
    counts = {name: getattr(held, name) for name in COUNT_COLUMNS}
    check_columns({"step": block.step, "worker": block.worker, **vars(block.places), **counts})
    if not isinstance(held.histogram, UnreadHistograms):
        _check_histograms(held.histogram)
    return block


def check_columns(columns: Mapping[str, NDArray[Any]]) -> None:
    """Hold columns of a segment against the limits of its figures: those that are there, each alone and with the others.

    Args:
        columns: name → numbers; all of one length.

    Raises:
        ValueError: with the column's name.
    """
    for name, (least, most) in _LIMITS.items():
        if name in columns:
            _within(name, columns[name], least, most)
    if "shard_count" in columns and "shard_index" in columns:
        _within("shard_index", columns["shard_count"] - columns["shard_index"], 1)
    if columns.keys() >= {*COUNT_COLUMNS}:
        taken = sum(columns[name] for name in COUNT_COLUMNS if name != "count")
        _within("count", columns["count"] - taken, 0)


def check_steps(step: NDArray[np.int64], first: int, last: int) -> None:
    """Hold the steps of a segment against those that its name or its footer says.

    Raises:
        ValueError: it holds others.
    """
    if len(step) and not (first <= int(step.min()) and int(step.max()) <= last):
        raise ValueError(f"holds steps {step.min()} to {step.max()}, not only {first} to {last}")


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
