"""Segments: one object with the statistics of many tensors over a range of steps, from one writer.

A segment is two Arrow IPC streams, one after the other, with one batch each:

1. The rows of a `Block`, one column per figure. ``tensor`` is an index into the catalogue in the stream's metadata, ``mode`` and ``stage`` are
   indices into `MODES` and `STAGES`. Columns of whole numbers with one value are not columns; the batch's metadata have their values.
2. The bins and counts of the rows' histograms, one after the other. Readers that do not use histograms do not decode them.

Any reader of Arrow IPC reads the first stream. Compaction rewrites the segments of a finished run as Parquet.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.format import ipc
from watchstep.format.block import STAGES, Block, Places
from watchstep.format.catalogue import CATALOGUE, catalogue_bytes, catalogue_of, check_version, metadata
from watchstep.format.segment_checks import (
    CONSTANT,
    MAX_BINS,
    MAX_BYTES,
    MAX_PROBES,
    MAX_ROWS,
    PROBE,
    check_steps,
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
from watchstep.format.tensors import MODES, TensorInfo, check_word

__all__ = [
    "LENGTHS",
    "MAX_BYTES",
    "Header",
    "check_codes",
    "check_constants",
    "column",
    "decode",
    "encode",
    "histograms",
    "metadata_of",
    "read_header",
]

_FACTS = b"watchstep.segment"
"""Key of the facts about a segment in its first batch."""

LENGTHS = "histogram_length"
"""Column with the number of bins of each row."""

_DTYPES: Mapping[str, np.dtype[Any]] = {
    **dict.fromkeys(("step", "time_ns", *COUNT_COLUMNS), np.dtype(np.int64)),
    **dict.fromkeys(
        ("tensor", "worker", "shard_index", "shard_count", "replica", LENGTHS), np.dtype(np.int32)
    ),
    **dict.fromkeys(("mode", "stage"), np.dtype(np.int8)),
    **dict.fromkeys(VALUE_COLUMNS, np.dtype(np.float64)),
}
_PROBE_DTYPE = np.dtype(np.float64)
_MAY_BE_CONSTANT = (*CONSTANT, *COUNT_COLUMNS)
_CODES: Mapping[str, int] = {"mode": len(MODES), "stage": len(STAGES)}
_HISTOGRAMS = (
    ipc.Column("histogram_bins", np.dtype(np.int16)),
    ipc.Column("histogram_counts", np.dtype(np.int64)),
)
_VALUE_BYTES, _BIN_BYTES = 8, 10
_MAX_FACTS = 16 * 1024
_MAX_CACHED = 256 * 1024  # bytes of a schema that is kept after it was parsed


@dataclass(frozen=True)
class Header:
    """What the beginning of a segment states.

    Attributes:
        rows: Number of rows.
        first: Smallest step; 0 without rows.
        last: Largest step; -1 without rows.
        columns: Names of columns and constants, without histograms.
        constant: Columns with one value in all rows, and the value.
        packed_catalogue: Its tensors, as by `catalogue_bytes`.
        histogram_values: Number of bins of all histograms.
        more_checksum: Checksum of the writer's further metadata.
        size: Size of the whole object in bytes.
        schema: Columns of the first stream.
        batch: Places of the columns.
    """

    rows: int
    first: int
    last: int
    columns: frozenset[str]
    constant: Mapping[str, int]
    packed_catalogue: bytes
    histogram_values: int
    more_checksum: int
    size: int
    schema: ipc.Schema
    batch: ipc.StreamBatch

    @property
    def histograms_at(self) -> int:
        """Offset of the second stream."""
        return self.batch.end + len(ipc.END_OF_STREAM)

    def check_size(self, size: int) -> None:
        """Check the size of the object, of which a reader may have read a part only.

        Raises:
            ValueError: The object is truncated, or longer.
        """
        if size != self.size:
            raise ValueError(f"has {size} bytes instead of {self.size}")

    def location(self, name: str) -> tuple[int, int] | None:
        """Return offset and length of a column's bytes in the object; None for a constant."""
        place = _places(self.schema).get(name)
        if place is None:
            return None
        offset, length = self.batch.parts[place]
        return self.batch.body + offset, length


def encode(block: Block, catalogue: bytes | None = None, more: Mapping[bytes, bytes] | None = None) -> bytes:
    """Encode one segment.

    Args:
        block: The rows.
        catalogue: The result of `catalogue_bytes` for the block's catalogue, if the caller has kept it.
        more: Further metadata.

    Raises:
        ValueError: The block was read without its histograms, which a segment requires.
    """
    histogram = block.statistics.histogram
    if isinstance(histogram, UnreadHistograms):
        raise ValueError("a segment requires histograms, but the block was read without them")  # noqa: TRY004 - not a type error for callers
    columns = _columns_of(block)
    constant = {name: int(columns[name][0]) for name in _MAY_BE_CONSTANT if _is_constant(columns[name])}
    for name in constant:
        del columns[name]
    schema = tuple(ipc.Column(name, values.dtype) for name, values in columns.items())
    more = more or {}
    bins: list[NDArray[Any]] = [np.ascontiguousarray(histogram.bins), np.ascontiguousarray(histogram.counts)]
    second = b"".join(
        [ipc.schema_message(_HISTOGRAMS, tuple(more.items())), ipc.batch_message(bins), ipc.END_OF_STREAM]
    )
    facts = json.dumps(
        {
            "first": int(block.step.min()) if len(block) else 0,
            "last": int(block.step.max()) if len(block) else -1,
            "histogram_values": len(histogram.bins),
            "histogram_bytes": len(second),
            "constant": constant,
            "columns": _checksum(entry.name.encode() for entry in schema),
            "more": _checksum(text for pair in more.items() for text in pair),
        },
        separators=(",", ":"),
    ).encode()
    kept = metadata(catalogue or catalogue_bytes(block.catalogue))
    rows: list[NDArray[Any]] = [np.ascontiguousarray(values) for values in columns.values()]
    return b"".join(
        [
            ipc.schema_message(schema, tuple(kept.items())),
            ipc.batch_message(rows, [(_FACTS, b"%08x" % zlib.crc32(facts) + facts)]),
            ipc.END_OF_STREAM,
            second,
        ]
    )


def _checksum(texts: Iterable[bytes]) -> int:
    """Return a checksum of what the messages of a stream state, which Arrow does not protect."""
    return zlib.crc32(b"\0".join(texts))


def _columns_of(block: Block) -> dict[str, NDArray[Any]]:
    statistics = block.statistics
    columns: dict[str, NDArray[Any]] = {
        "step": block.step,
        "tensor": block.tensor,
        "time_ns": block.time_ns,
        "mode": block.mode,
        "worker": block.worker,
        **vars(block.places),
        **{name: getattr(statistics, name) for name in (*COUNT_COLUMNS, *VALUE_COLUMNS)},
        LENGTHS: np.diff(statistics.histogram.offsets),
    }
    columns = {name: values.astype(_DTYPES[name], copy=False) for name, values in columns.items()}
    probes = {PROBE + name: values.astype(_PROBE_DTYPE, copy=False) for name, values in block.probes.items()}
    return columns | probes


def _is_constant(values: NDArray[Any]) -> bool:
    return len(values) > 0 and bool((values == values[0]).all())


def decode(
    data: bytes, name: str, *, histograms: bool = True, most_rows: int = MAX_ROWS, most_bins: int = MAX_BINS
) -> Block:
    """Decode a segment. Sizes are checked before memory is allocated.

    Args:
        data: The object's bytes.
        name: Name of the segment for error messages.
        histograms: False omits them; damage in them is then not detected, and access to them raises `ConfigError`.
        most_rows: Limit of the rows.
        most_bins: Number of bins of all histograms beyond which they are omitted.

    Raises:
        FormatError: The bytes are not a complete segment, have another version, or claim sizes over the limits.
    """
    with whole(name):
        _check_size(data)
        header = read_header(data, name)
        header.check_size(len(data))
        if header.rows > most_rows:
            raise ValueError(f"contains {header.rows} rows; at most {most_rows} are read")
        histograms = histograms and header.histogram_values <= most_bins
        catalogue = catalogue_of(header.packed_catalogue)
        found = {column_name: column(data, header, column_name) for column_name in header.columns}
        lengths = column(data, header, LENGTHS)
        bins = _histograms(data, header, lengths) if histograms else UnreadHistograms(header.rows)
        block = _block(found, catalogue, bins)
        check_steps(block.step, header.first, header.last)
        return check_values(block)


def metadata_of(data: bytes, name: str) -> Mapping[bytes, bytes]:
    """Return the metadata that the writer passed to `encode` as ``more``.

    Raises:
        FormatError: The bytes are not a segment of the supported version.
    """
    with whole(name):
        _check_size(data)
        header = read_header(data, name)
        start, end = ipc.message_end(data, header.histograms_at)
        more = _schema(bytes(memoryview(data)[start:end])).metadata
        if _checksum(text for pair in more.items() for text in pair) != header.more_checksum:
            raise ValueError("its further metadata are damaged")
        return more


def _check_size(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise ValueError(f"has {len(data)} bytes, over the limit of {MAX_BYTES}")


def read_header(data: ipc.Bytes, name: str) -> Header:
    """Read the beginning of a segment.

    Args:
        data: The object, or a first part of it.
        name: Name of the segment for error messages.

    Raises:
        TruncatedError: The header is longer than the data.
        FormatError: It has another version.
        ValueError, TypeError, KeyError: It is damaged, or claims sizes over the limits.
    """
    view = memoryview(data)
    start, end = ipc.message_end(view, 0)
    schema = _schema(bytes(view[start:end]))
    check_version(dict(schema.metadata), name)
    batch = ipc.read_batch(view, *ipc.message_end(view, end), schema.columns)
    facts = _facts(batch.metadata[_FACTS])
    constant = {key: int(facts["constant"][key]) for key in _MAY_BE_CONSTANT if key in facts["constant"]}
    columns = frozenset(_places(schema).keys() - {LENGTHS} | constant.keys())
    _check_columns(schema, columns, constant)
    if _checksum(entry.name.encode() for entry in schema.columns) != facts["columns"]:
        raise ValueError("the names of its columns are damaged")
    values = int(facts["histogram_values"])
    if not 0 <= values <= MAX_BINS or not 0 <= batch.rows <= MAX_ROWS:
        raise ValueError(f"claims {batch.rows} rows and {values} bins, over the limits")
    claimed = batch.rows * _VALUE_BYTES * (len(columns) + 1) + values * _BIN_BYTES
    if claimed > MAX_BYTES:
        raise ValueError(f"claims {batch.rows} rows and {claimed} bytes, over the limits")
    check_constants(constant)
    first, last = int(facts["first"]), int(facts["last"])
    return Header(
        rows=batch.rows,
        first=first,
        last=last,
        columns=columns,
        constant=constant,
        packed_catalogue=schema.metadata[CATALOGUE],
        histogram_values=values,
        more_checksum=int(facts["more"]),
        size=batch.end + len(ipc.END_OF_STREAM) + int(facts["histogram_bytes"]),
        schema=schema,
        batch=batch,
    )


def _schema(message: bytes) -> ipc.Schema:
    return ipc.read_schema(message) if len(message) > _MAX_CACHED else _cached_schema(message)


_cached_schema = functools.lru_cache(maxsize=32)(ipc.read_schema)


def _places(schema: ipc.Schema) -> Mapping[str, int]:
    """Return the index of each column that is read; columns of later versions are omitted."""
    return _known_places(schema.columns)


@functools.lru_cache(maxsize=32)
def _known_places(columns: tuple[ipc.Column, ...]) -> Mapping[str, int]:
    return {
        found.name: place
        for place, found in enumerate(columns)
        if found.name in _DTYPES or found.name.startswith(PROBE)
    }


def _check_columns(schema: ipc.Schema, columns: frozenset[str], constant: Mapping[str, int]) -> None:
    for name, place in _places(schema).items():
        due = _DTYPES.get(name, _PROBE_DTYPE)
        if name in constant or schema.columns[place].dtype != due:
            raise ValueError(f"column {name[:80]} is of type {schema.columns[place].dtype}, or stated twice")
    probes = [name for name in columns if name.startswith(PROBE)]
    if len(probes) > MAX_PROBES:
        raise ValueError(f"{len(probes)} probes, at most {MAX_PROBES} are read")
    for name in probes:
        check_word("probe", name)
    missing = _DTYPES.keys() - columns - _places(schema).keys()
    if missing:
        raise ValueError(f"column {min(missing)} is missing")


def check_constants(constant: Mapping[str, int]) -> None:
    """Check that columns with one value may have one, and that the values are possible.

    Raises:
        ValueError: They may not, or are not.
    """
    for name, value in constant.items():
        if name not in _MAY_BE_CONSTANT:
            raise ValueError(f"column {name[:80]} may not be stated as one value")
        if not 0 <= value < min(_CODES.get(name, value + 1), np.iinfo(_DTYPES[name]).max + 1):
            raise ValueError(f"column {name} has the impossible value {value}")


def _facts(stored: bytes) -> dict[str, Any]:
    check, text = stored[:8], stored[8:]
    if len(text) > _MAX_FACTS or int(check, 16) != zlib.crc32(text):
        raise ValueError("the facts about it are damaged")
    facts = json.loads(text)
    if not isinstance(facts, dict) or not isinstance(facts["constant"], dict):
        raise TypeError("the facts about it have another form")
    return facts


def column(data: ipc.Bytes, header: Header, name: str) -> NDArray[Any]:
    """Return the values of a column or a constant, shape (rows,), with the codes of words checked.

    Args:
        data: The object; bytes of other columns may be missing or zero.
        header: Its header.
        name: One of the header's columns.

    Raises:
        ValueError, OverflowError, RuntimeError: The column is damaged.
    """
    place = _places(header.schema).get(name)
    if place is None:
        values = np.full(header.rows, header.constant[name], _DTYPES[name])
    else:
        values = ipc.column_values(data, header.batch, place, header.schema.columns[place])
    if name in _CODES:
        check_codes(name, values, _CODES[name])
    return values


def check_codes(name: str, codes: NDArray[Any], words: int) -> None:
    """Check that codes are indices of words.

    Raises:
        ValueError: One is not.
    """
    if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < words:
        raise ValueError(f"column {name} has the index of an unknown word")


def histograms(data: ipc.Bytes, header: Header) -> Histograms:
    """Return the histograms of all rows. Their bins and counts are not checked.

    Args:
        data: The object; bytes of columns other than the histograms' may be missing or zero.
        header: Its header.

    Raises:
        ValueError, RuntimeError: They are damaged.
    """
    return _histograms(data, header, column(data, header, LENGTHS))


def _histograms(data: ipc.Bytes, header: Header, lengths: NDArray[np.int32]) -> Histograms:
    view = memoryview(data)
    start, end = ipc.message_end(view, header.histograms_at)
    schema = _schema(bytes(view[start:end]))
    if schema.columns != _HISTOGRAMS:
        raise ValueError("its histograms have other columns")
    batch = ipc.read_batch(view, *ipc.message_end(view, end), schema.columns)
    if (
        (lengths < 0).any()
        or batch.rows != header.histogram_values
        or int(lengths.sum(dtype=np.int64)) != batch.rows
    ):
        raise ValueError("its histograms do not match its rows")
    if bytes(view[batch.end : batch.end + len(ipc.END_OF_STREAM)]) != ipc.END_OF_STREAM:
        raise ValueError("it is cut short")
    offsets = np.zeros(header.rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    bins, counts = (ipc.column_values(view, batch, place, found) for place, found in enumerate(_HISTOGRAMS))
    return Histograms(offsets, bins, counts)


def _block(columns: Mapping[str, NDArray[Any]], catalogue: Sequence[TensorInfo], bins: Histograms) -> Block:
    tensor = columns["tensor"]
    check_codes("tensor", tensor, len(catalogue))
    if len({info.name for info in catalogue}) != len(catalogue):
        raise ValueError("two of its tensors have the same name")
    return Block(
        step=columns["step"],
        mode=columns["mode"],
        worker=columns["worker"],
        time_ns=columns["time_ns"],
        tensor=tensor,
        catalogue=tuple(catalogue),
        places=Places(columns["shard_index"], columns["shard_count"], columns["replica"], columns["stage"]),
        statistics=StatisticsBatch(
            **{name: columns[name] for name in (*COUNT_COLUMNS, *VALUE_COLUMNS)}, histogram=bins
        ),
        probes={
            name.removeprefix(PROBE): values for name, values in columns.items() if name.startswith(PROBE)
        },
    )
