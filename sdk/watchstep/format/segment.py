"""Segments: encoding, decoding, and the checks of an object before memory is taken for it.

What must hold of a segment before memory is taken for it, and of its figures before anything counts on them.

A segment: one object with the statistics of many tensors over a range of steps, from one writer.

It is a Parquet file whose rows are those of a `Block`; the catalogue of its tensors travels in the file's metadata,
so that every segment can be read by itself, by Watchstep or by anything else that reads Parquet.
"""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError
from watchstep.format.block import STAGES, Block, Places, from_codes, from_numbers, to_numbers, to_places
from watchstep.format.documents import parse_json
from watchstep.format.layout import SCHEMA_VERSION, check_schema
from watchstep.format.parquet_claims import Claims, ColumnClaim, claims_of, read_claims, read_footer
from watchstep.format.statistics import (
    BIN_RANGE,
    COUNT_COLUMNS,
    VALUE_COLUMNS,
    Histograms,
    StatisticsBatch,
    UnreadHistograms,
)
from watchstep.format.tensors import MAX_WORD_BYTES, MODES, KnownCatalogues, TensorInfo, check_word

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
    statistics = block.statistics
    counts = {name: getattr(statistics, name) for name in COUNT_COLUMNS}
    check_columns({"step": block.step, "worker": block.worker, **vars(block.places), **counts})
    if not isinstance(statistics.histogram, UnreadHistograms):
        _check_histograms(statistics.histogram)
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


_MAX_CATALOGUE = 16 * 1024 * 1024
_MAX_CATALOGUE_MEMORY = 256 * 1024 * 1024
_MOST_LISTS, _MOST_VALUES = 64, 1024
"""Brackets and commas of a catalogue for each tensor in it, in its names included: a parser holds the interpreter's lock as long as it makes lists."""
_MAX_META = 4096
_known = KnownCatalogues()
__all__ = [
    "CATALOGUE",
    "CONSTANT",
    "MAX_BYTES",
    "MAX_ROWS",
    "catalogue_bytes",
    "catalogue_of",
    "check_version",
    "decode",
    "encode",
    "metadata",
    "metadata_of",
    "to_block",
    "to_table",
    "whole",
]

CONSTANT = ("mode", "worker", "shard_index", "shard_count", "replica", "stage")
"""Columns that mostly have one value in an object; its footer says so, and they need not be read."""

_DENSE = frozenset({*VALUE_COLUMNS, "histogram_bins.list.element", "histogram_counts.list.element"})
"""Columns that zstd makes a third smaller than LZ4 does; of the others both make next to nothing, LZ4 in half the time."""

_META = b"watchstep"
CATALOGUE = b"watchstep.tensors"
"""Key of the catalogue in a segment's metadata."""

_MEND = "the writer or the transfer damaged it; what other segments hold can still be read"


def catalogue_bytes(catalogue: tuple[TensorInfo, ...]) -> bytes:
    """The catalogue as it stands in a segment's metadata. Writers keep it while the tensors stay the same."""
    text = json.dumps([info.as_data() for info in catalogue], separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 6))


def metadata(catalogue: bytes) -> dict[bytes, bytes]:
    """A segment's metadata, with what `catalogue_bytes` gave."""
    return {_META: json.dumps({"schema": SCHEMA_VERSION}).encode(), CATALOGUE: catalogue}


def check_version(stored: dict[bytes, bytes], name: str) -> None:
    """Refuse a segment of another version, by its metadata.

    Raises:
        FormatError: it is of one.
        ValueError, TypeError, KeyError: it is no segment's metadata.
    """
    check_schema(f"segment {name}", schema_of(stored))


def schema_of(stored: dict[bytes, bytes]) -> int:
    """The version that a segment's metadata state.

    Raises:
        ValueError, TypeError, KeyError: it is no segment's metadata.
    """
    if len(stored[_META]) > _MAX_META:
        raise ValueError(f"its metadata take {len(stored[_META])} bytes, at most {_MAX_META} are read")
    return int(json.loads(stored[_META])["schema"])


def encode(block: Block, catalogue: bytes | None = None, more: Mapping[bytes, bytes] | None = None) -> bytes:
    """One segment's bytes.

    Args:
        block: the rows.
        catalogue: what `catalogue_bytes` gives for the block's catalogue, where the caller has kept it.
        more: further metadata.

    Raises:
        ValueError: the block was read without its histograms, and a segment has them.
    """
    table = to_table(block)
    if not {*table.column_names} >= HISTOGRAM_COLUMNS:
        raise ValueError("a segment holds histograms, and the block was read without")
    meta = {**metadata(catalogue or catalogue_bytes(block.catalogue)), **(more or {})}
    return encode_table(table.replace_schema_metadata(meta))


def encode_table(table: pa.Table) -> bytes:
    """One segment's bytes, from the table with its metadata."""
    import pyarrow.parquet as pq

    probes = [name for name in table.column_names if name.startswith(PROBE)]
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        compression={leaf: "zstd" if leaf in _DENSE else "lz4" for leaf in _leaves(table.column_names)},
        use_dictionary=list(WORD_COLUMNS),
        use_byte_stream_split=[*VALUE_COLUMNS, *probes],
        write_statistics=["step", "tensor", *CONSTANT],
        write_page_checksum=True,
    )
    return sink.getvalue()


def _leaves(columns: list[str]) -> list[str]:
    """Columns as Parquet calls them, whose leaves are what is compressed."""
    return [f"{name}.list.element" if name.startswith("histogram") else name for name in columns]


def to_table(block: Block) -> pa.Table:
    """The rows as an Arrow table, one column a figure, as they stand in a segment; histograms where they were read."""
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
    columns.update(_histogram_columns(statistics.histogram))
    columns.update(
        {PROBE + name: from_numbers(column, nan_is_null=True) for name, column in block.probes.items()}
    )
    return pa.table(columns)


def _histogram_columns(histograms: Histograms) -> dict[str, Any]:
    """Their columns; none where they were not read."""
    import pyarrow as pa

    if isinstance(histograms, UnreadHistograms):
        return {}
    offsets = from_numbers(histograms.offsets.astype(np.int32))
    return {
        "histogram_bins": pa.ListArray.from_arrays(offsets, from_numbers(histograms.bins)),
        "histogram_counts": pa.ListArray.from_arrays(offsets, from_numbers(histograms.counts)),
    }


@dataclass(frozen=True)
class _Opened:
    table: Any
    catalogue: tuple[TensorInfo, ...]


def decode(data: bytes, name: str, *, histograms: bool = True) -> Block:
    """Read a segment; sizes are checked before memory is taken.

    Args:
        data: the object's bytes.
        name: what to call it in an error.
        histograms: False leaves them out, and damage in them unnoticed; to look into them is a `ConfigError` then.

    Raises:
        FormatError: the bytes are no whole segment, are of another version, or claim sizes over the limits.
    """
    with whole(name):
        return check_values(_to_block(_open(data, name, histograms=histograms)))


def metadata_of(data: bytes, name: str) -> dict[bytes, bytes]:
    """What a segment's metadata say.

    Raises:
        FormatError: the bytes are no segment of the version that this one reads.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with whole(name):
        read_claims(data)
        stored: dict[bytes, bytes] = pq.read_metadata(pa.BufferReader(data)).metadata or {}
        check_version(stored, name)
        return stored


def to_block(table: pa.Table, catalogue: tuple[TensorInfo, ...], name: str) -> Block:
    """The rows of a table with all columns of a segment, as a block.

    Raises:
        FormatError: a figure or word is such as a segment cannot hold.
    """
    with whole(name):
        return check_values(_to_block(_Opened(table, catalogue)))


@contextmanager
def whole(name: str) -> Iterator[None]:
    """Whatever damaged bytes make the code inside raise, told as one error.

    Raises:
        FormatError: with what to call the object.
        MemoryError: memory is short, which says nothing of the bytes.
    """
    import pyarrow as pa

    try:
        yield
    except (FormatError, MemoryError):  # an ArrowMemoryError is both an ArrowException and a MemoryError
        raise
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        OverflowError,
        RecursionError,
        zlib.error,
    ) as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise FormatError(f"segment {name}: not a whole segment ({reason})", _MEND) from error


def _open(data: bytes, name: str, *, histograms: bool) -> _Opened:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if len(data) > MAX_BYTES:
        raise FormatError(f"segment {name}: {len(data)} bytes, over the limit of {MAX_BYTES}", _MEND)
    footer = read_footer(data)
    check_leaves(footer.leaves)
    file = pq.ParquetFile(
        pa.BufferReader(data), read_dictionary=list(WORD_COLUMNS), page_checksum_verification=True
    )
    stored = file.metadata.metadata or {}
    check_version(stored, name)
    columns = [
        column
        for column in checked_columns(file.schema_arrow)
        if histograms or column not in HISTOGRAM_COLUMNS
    ]
    check_claims(claims_of(data, footer, frozenset(columns)), columns)
    catalogue = catalogue_of(stored[CATALOGUE])
    return _Opened(file.read(columns, use_threads=False), catalogue)


def catalogue_of(stored: bytes) -> tuple[TensorInfo, ...]:
    """The catalogue that `catalogue_bytes` packed.

    Raises:
        ValueError, TypeError, KeyError, zlib.error: it is none, or over the limit.
    """
    return _known.get(stored, _unpacked)


def _unpacked(stored: bytes) -> tuple[int, tuple[TensorInfo, ...]]:
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(base64.b64decode(stored, validate=True), _MAX_CATALOGUE)
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError("the catalogue of its tensors is too large or cut short")
    tensors = text.count(b"{")
    if text.count(b"[") > _MOST_LISTS * (tensors + 1) or text.count(b",") > _MOST_VALUES * (tensors + 1):
        raise ValueError("the catalogue of its tensors holds other data than tensors")
    return len(text), tuple(TensorInfo.from_data(entry) for entry in parse_json(text, _MAX_CATALOGUE_MEMORY))


def _to_block(opened: _Opened) -> Block:
    table = opened.table.combine_chunks()
    places = {info.name: place for place, info in enumerate(opened.catalogue)}
    if len(places) != len(opened.catalogue):
        raise ValueError("two of its tensors have one name")
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
        catalogue=opened.catalogue,
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
