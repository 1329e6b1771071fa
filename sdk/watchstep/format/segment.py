"""Segments: encoding, decoding, and checks of an object before memory is allocated for it.

The checks cover a segment's sizes before memory is allocated for it, and its figures before they are used.

A segment: one object with the statistics of many tensors over a range of steps, from one writer.

It is a Parquet file whose rows are those of a `Block`; the file's metadata contain the catalogue of its tensors,
so that every segment can be read independently, by Watchstep or any other reader of Parquet.
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
"""Maximum size of a segment for readers, compressed or not."""

MAX_ROWS = 1_000_000
"""Maximum number of rows of one segment; with their columns they take about 250 MB."""

HISTOGRAM_COLUMNS = frozenset({"histogram_bins", "histogram_counts"})

PROBE = "probe."
"""Prefix of a probe's column."""

WORD_COLUMNS = ("mode", "tensor", "stage")
"""Columns of text. Readers read them as indices into a dictionary, so that rows have no copies of their text."""

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
    """Return the columns to read, with checked types. Additional columns of later versions are omitted."""
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
    """Check that the read columns are a segment's own, and those of histograms are list elements.

    pyarrow reads all columns with a path that begins with a requested name.

    Raises:
        ValueError: Another column would be read; the message has its path.
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
        if number > _MAX_BINS if name in HISTOGRAM_COLUMNS else number != claims.rows:
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


def check_values(block: Block) -> Block:
    """Return the same block if its figures are possible for a tensor.

    Raises:
        ValueError: A figure is invalid; the message has the column's name.
    """
    statistics = block.statistics
    counts = {name: getattr(statistics, name) for name in COUNT_COLUMNS}
    check_columns({"step": block.step, "worker": block.worker, **vars(block.places), **counts})
    if not isinstance(statistics.histogram, UnreadHistograms):
        _check_histograms(statistics.histogram)
    return block


def check_columns(columns: Mapping[str, NDArray[Any]]) -> None:
    """Check the present columns of a segment against the limits of its figures, individually and combined.

    Args:
        columns: Numbers by name, all of the same length.

    Raises:
        ValueError: A figure is invalid; the message has the column's name.
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
    """Check the steps of a segment against those in its name or footer.

    Raises:
        ValueError: The segment has other steps.
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
    "histograms_of",
    "metadata",
    "metadata_of",
    "to_block",
    "to_table",
    "whole",
]

CONSTANT = ("mode", "worker", "shard_index", "shard_count", "replica", "stage")
"""Columns that usually have one value in an object. The footer then has the value, and they need not be read."""

_DENSE = frozenset({*VALUE_COLUMNS, "histogram_bins.list.element", "histogram_counts.list.element"})
"""Columns that zstd makes a third smaller than LZ4 does; of the others both make next to nothing, LZ4 in half the time."""

_META = b"watchstep"
CATALOGUE = b"watchstep.tensors"
"""Key of the catalogue in a segment's metadata."""

_MEND = "the writer or the transfer damaged it; other segments can still be read"


def catalogue_bytes(catalogue: tuple[TensorInfo, ...]) -> bytes:
    """Return the catalogue in the form of a segment's metadata. Writers keep it while the tensors stay the same."""
    text = json.dumps([info.as_data() for info in catalogue], separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 6))


def metadata(catalogue: bytes) -> dict[bytes, bytes]:
    """Return a segment's metadata, with the result of `catalogue_bytes`."""
    return {_META: json.dumps({"schema": SCHEMA_VERSION}).encode(), CATALOGUE: catalogue}


def check_version(stored: dict[bytes, bytes], name: str) -> None:
    """Check in a segment's metadata that its version is supported.

    Raises:
        FormatError: The segment has another version.
        ValueError, TypeError, KeyError: These are not a segment's metadata.
    """
    check_schema(f"segment {name}", schema_of(stored))


def schema_of(stored: dict[bytes, bytes]) -> int:
    """Return the version in a segment's metadata.

    Raises:
        ValueError, TypeError, KeyError: These are not a segment's metadata.
    """
    if len(stored[_META]) > _MAX_META:
        raise ValueError(f"its metadata take {len(stored[_META])} bytes, at most {_MAX_META} are read")
    return int(json.loads(stored[_META])["schema"])


def encode(block: Block, catalogue: bytes | None = None, more: Mapping[bytes, bytes] | None = None) -> bytes:
    """Encode one segment.

    Args:
        block: The rows.
        catalogue: The result of `catalogue_bytes` for the block's catalogue, if the caller has kept it.
        more: Further metadata.

    Raises:
        ValueError: The block was read without its histograms, which a segment requires.
    """
    table = to_table(block)
    if not {*table.column_names} >= HISTOGRAM_COLUMNS:
        raise ValueError("a segment requires histograms, but the block was read without them")
    meta = {**metadata(catalogue or catalogue_bytes(block.catalogue)), **(more or {})}
    return encode_table(table.replace_schema_metadata(meta))


def encode_table(table: pa.Table) -> bytes:
    """Encode one segment from the table with its metadata."""
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
    """Return the columns by their names in Parquet, which compresses their leaves."""
    return [f"{name}.list.element" if name.startswith("histogram") else name for name in columns]


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
    columns.update(_histogram_columns(statistics.histogram))
    columns.update(
        {PROBE + name: from_numbers(column, nan_is_null=True) for name, column in block.probes.items()}
    )
    return pa.table(columns)


def _histogram_columns(histograms: Histograms) -> dict[str, Any]:
    """Return the columns of the histograms, without any if they were not read."""
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
    """Decode a segment. Sizes are checked before memory is allocated.

    Args:
        data: The object's bytes.
        name: Name of the segment for error messages.
        histograms: False omits them; damage in them is then not detected, and access to them raises `ConfigError`.

    Raises:
        FormatError: The bytes are not a complete segment, have another version, or claim sizes over the limits.
    """
    with whole(name):
        return check_values(_to_block(_open(data, name, histograms=histograms)))


def metadata_of(data: bytes, name: str) -> dict[bytes, bytes]:
    """Return a segment's metadata.

    Raises:
        FormatError: The bytes are not a segment of the supported version.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with whole(name):
        read_claims(data)
        stored: dict[bytes, bytes] = pq.read_metadata(pa.BufferReader(data)).metadata or {}
        check_version(stored, name)
        return stored


def to_block(table: pa.Table, catalogue: tuple[TensorInfo, ...], name: str) -> Block:
    """Convert a table with all columns of a segment to a block.

    Raises:
        FormatError: A figure or word is not valid in a segment.
    """
    with whole(name):
        return check_values(_to_block(_Opened(table, catalogue)))


@contextmanager
def whole(name: str) -> Iterator[None]:
    """Convert every error that damaged bytes cause in the body to one error.

    Raises:
        FormatError: The bytes are damaged. The message has the name of the object.
        MemoryError: Memory is exhausted, which does not depend on the bytes.
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
        raise FormatError(f"segment {name} is not a complete segment ({reason})", _MEND) from error


def _open(data: bytes, name: str, *, histograms: bool) -> _Opened:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if len(data) > MAX_BYTES:
        raise FormatError(f"segment {name} has {len(data)} bytes, over the limit of {MAX_BYTES}", _MEND)
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
    """Return the catalogue that `catalogue_bytes` packed.

    Raises:
        ValueError, TypeError, KeyError, zlib.error: The bytes are not a catalogue, or exceed the limit.
    """
    return _known.get(stored, _unpacked)


def _unpacked(stored: bytes) -> tuple[int, tuple[TensorInfo, ...]]:
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(base64.b64decode(stored, validate=True), _MAX_CATALOGUE)
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError("the catalogue of its tensors is too large or truncated")
    tensors = text.count(b"{")
    if text.count(b"[") > _MOST_LISTS * (tensors + 1) or text.count(b",") > _MOST_VALUES * (tensors + 1):
        raise ValueError("the catalogue of its tensors contains data other than tensors")
    return len(text), tuple(TensorInfo.from_data(entry) for entry in parse_json(text, _MAX_CATALOGUE_MEMORY))


def _to_block(opened: _Opened) -> Block:
    table = opened.table.combine_chunks()
    places = {info.name: place for place, info in enumerate(opened.catalogue)}
    if len(places) != len(opened.catalogue):
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


def histograms_of(table: pa.Table) -> Histograms:
    """Return the histograms of some rows of a segment.

    Raises:
        ValueError: They are not valid.
    """
    histograms = _histograms(table)
    _check_histograms(histograms)
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
