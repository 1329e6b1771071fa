"""TensorBoard event files: rows of statistics as events, and the files that contain them.

An event file is a sequence of records (`watchstep.format.event_files.tf_records`). The data of a record is an ``Event`` of TensorFlow's ``event.proto``,
whose values are a ``Summary`` of ``summary.proto``. Both are encoded here, so that neither TensorBoard nor a protobuf library is needed.

Rows become scalars and histograms:

- losses and metrics: the scalar ``<name>``, their mean;
- other tensors: the scalars ``<tensor>/<figure>`` and ``<tensor>/<probe>``, and the histogram ``<tensor>`` from the exponent histogram.

Rows about objects with saved tensors, and figures that do not exist, are omitted. Characters that TensorBoard does not accept in names,
such as ``:``, become ``_``. The rows of each mode and worker belong in a folder of their own, ``<mode>-<worker>``.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError
from watchstep.format.block import Block
from watchstep.format.event_files.tf_records import record
from watchstep.format.statistics import (
    COUNT_COLUMNS,
    DERIVED,
    VALUE_COLUMNS,
    Floats,
    StatisticsBatch,
    exponent_of_bin,
    is_negative_bin,
)
from watchstep.format.tensors import LOSSES, METRICS, MODES, SAVED

FIGURES = ("mean", "std", "rms", "abs_max")
"""Figures of a tensor that become scalars, in addition to its probes."""

_INVALID_IN_TAGS = re.compile(r"[^-/\w.]")
_ROWS_AT_ONCE = 512
"""Number of rows whose buckets are in memory together: some MB with the usual number of bins."""

_TAGS = 16_384
"""Number of cached tags."""


class Events(NamedTuple):
    """Encoded events of one event file.

    Attributes:
        folder: name of the file's folder, ``<mode>-<worker>``.
        data: records; empty if the rows have no values.
        values: number of scalars and histograms in them.
        rows: number of encoded rows.
    """

    folder: str
    data: bytes
    values: int
    rows: int


def encode_rows(block: Block, figures: tuple[str, ...] = FIGURES) -> Iterator[Events]:
    """Encode rows: one event for each worker, mode, step and time, in this order.

    Args:
        block: rows in any order, with their histograms.
        figures: figures of each tensor.

    Raises:
        ConfigError: a figure does not exist.
    """
    order = np.lexsort((block.time_ns, block.step, block.mode, block.worker))
    for start in range(0, len(order), _ROWS_AT_ONCE):
        yield from _encode_some(block.take(order[start : start + _ROWS_AT_ONCE]), figures)


def _encode_some(block: Block, figures: tuple[str, ...]) -> Iterator[Events]:
    values = _values_of(block, figures)
    keys = np.stack([block.worker, block.mode, block.step, block.time_ns], axis=1)
    changes = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
    files = np.flatnonzero((keys[1:, :2] != keys[:-1, :2]).any(axis=1)) + 1
    for first, end in _ranges(0, files, len(block)):
        data, number = [], 0
        for start, stop in _ranges(first, changes[(changes > first) & (changes < end)], end):
            parts = [part for row in values[start:stop] for part in row]
            if parts:
                seconds = int(block.time_ns[start]) / 1e9
                data.append(_summary_event(int(block.step[start]), seconds, b"".join(parts)))
                number += len(parts)
        folder = f"{MODES[int(block.mode[first])]}-{int(block.worker[first])}"
        yield Events(folder, b"".join(data), number, end - first)


def _ranges(start: int, bounds: NDArray[np.intp], end: int) -> Iterator[tuple[int, int]]:
    return pairwise([start, *bounds.tolist(), end])


def _values_of(block: Block, figures: tuple[str, ...]) -> list[list[bytes]]:
    """Return the encoded values of each row."""
    collections = [info.collections for info in block.catalogue]
    is_scalar = block.mask_of_tensors([LOSSES in names or METRICS in names for names in collections])
    is_tensor = ~is_scalar & ~block.mask_of_tensors([SAVED in names for names in collections])
    names = [info.name for info in block.catalogue]
    tensors = block.tensor.tolist()
    values: list[list[bytes]] = [[] for _ in tensors]

    def add(column: Floats, rows: NDArray[np.bool_], suffix: str) -> None:
        with np.errstate(over="ignore"):
            data = column.astype("<f4").tobytes()
        for row in np.flatnonzero(rows & ~np.isnan(column)).tolist():
            values[row].append(_scalar_field(names[tensors[row]], suffix) + data[4 * row : 4 * row + 4])

    with np.errstate(all="ignore"):
        add(block.statistics.mean, is_scalar, "")
        for figure in figures:
            add(_figure(block.statistics, figure), is_tensor, f"/{figure}")
    for probe, column in block.probes.items():
        add(column, is_tensor, f"/{probe}")
    with_histogram = np.flatnonzero(is_tensor & (block.statistics.finite > 0))
    histograms = _histograms(block.statistics.take(with_histogram))
    for row, histogram in zip(with_histogram.tolist(), histograms, strict=True):
        tag = _tag_field(names[tensors[row]], "")
        value = tag + b"\x2a" + _varint(len(histogram)) + histogram
        values[row].append(b"\x0a" + _varint(len(value)) + value)
    return values


def _figure(statistics: StatisticsBatch, name: str) -> Floats:
    if name in DERIVED:
        return DERIVED[name](statistics)
    if name in COUNT_COLUMNS or name in VALUE_COLUMNS:
        column: Floats = getattr(statistics, name).astype(np.float64)
        return column
    raise ConfigError(
        f"figure {name!r} does not exist",
        f"use some of {', '.join((*COUNT_COLUMNS, *VALUE_COLUMNS, *DERIVED))}",
    )


def _tag(name: str, suffix: str) -> str:
    return _INVALID_IN_TAGS.sub("_", name + suffix).lstrip("/")


@functools.lru_cache(maxsize=_TAGS)
def _tag_field(name: str, suffix: str) -> bytes:
    tag = _tag(name, suffix).encode("utf-8", "replace")
    return b"\x0a" + _varint(len(tag)) + tag


@functools.lru_cache(maxsize=_TAGS)
def _scalar_field(name: str, suffix: str) -> bytes:
    """Return a value of a summary without its last four bytes, the number."""
    tag = _tag_field(name, suffix)
    return b"\x0a" + _varint(len(tag) + 5) + tag + b"\x15"


_HISTOGRAM = np.dtype(
    [
        (name, kind)
        for index, figure in enumerate(("min", "max", "num", "sum", "sum_squares"), start=1)
        for name, kind in ((f"key_{index}", "u1"), (figure, "<f8"))
    ]
)
"""The first fields of a ``HistogramProto``: each a key of one byte, and a double."""


def _histograms(statistics: StatisticsBatch) -> Iterator[bytes]:
    """Yield the histogram of each row; each has finite elements."""
    head = np.empty(len(statistics), _HISTOGRAM)
    for index in range(1, 6):
        head[f"key_{index}"] = index << 3 | 1
    finite = statistics.finite.astype(np.float64)
    head["min"], head["max"], head["num"] = statistics.min, statistics.max, finite
    with np.errstate(all="ignore"):
        head["sum"] = statistics.mean * finite
    head["sum_squares"] = statistics.square_sum
    offsets, limits, counts = _buckets(statistics)
    heads, all_limits, all_counts = head.tobytes(), limits.tobytes(), counts.tobytes()
    size = _HISTOGRAM.itemsize
    for row, (begin, end) in enumerate(pairwise(offsets.tolist())):
        length, part = _varint(8 * (end - begin)), slice(8 * begin, 8 * end)
        fields = (b"\x32", length, all_limits[part], b"\x3a", length, all_counts[part])
        yield heads[size * row : size * (row + 1)] + b"".join(fields)


def _buckets(statistics: StatisticsBatch) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return the buckets of all rows: offsets of shape (n + 1,), upper limits, ascending within a row, and numbers of elements."""
    histogram, rows = statistics.histogram, len(statistics)
    sign = np.where(is_negative_bin(histogram.bins), -1.0, 1.0)
    exponent = exponent_of_bin(histogram.bins).astype(np.int32)
    with np.errstate(over="ignore"):
        far = np.minimum(np.ldexp(1.0, exponent + 1), np.finfo(np.float64).max)
    edges = sign * np.ldexp(1.0, exponent), sign * far
    with_zeros = np.flatnonzero(statistics.zero > 0)
    nothing = np.zeros(len(with_zeros))
    row = np.concatenate([np.repeat(np.arange(rows), np.diff(histogram.offsets)), with_zeros])
    low = np.concatenate([np.minimum(*edges), nothing])
    high = np.concatenate([np.maximum(*edges), nothing])
    count = np.concatenate([histogram.counts, statistics.zero[with_zeros]]).astype(np.float64)
    order = np.lexsort((high, low, row))
    row, low, high, count = row[order], low[order], high[order], count[order]
    # TensorBoard takes a bucket's lower limit from the previous bucket. Without an empty bucket between two bins that are no
    # neighbours, the elements of the second would be spread over the distance.
    gap = np.zeros(len(row), np.bool_)
    gap[1:] = (row[1:] == row[:-1]) & (high[:-1] < low[1:]) & (low[1:] < high[1:])
    place = np.arange(len(row)) + np.cumsum(gap)
    limits, counts = np.zeros(len(row) + int(gap.sum())), np.zeros(len(row) + int(gap.sum()))
    limits[place], counts[place] = high, count
    limits[place[gap] - 1] = low[gap]
    lengths = np.bincount(row, weights=1.0 + gap, minlength=rows).astype(np.int64)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), limits, counts


@functools.lru_cache(maxsize=4096)
def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def _event(wall_time: float, content: bytes) -> bytes:
    """Return a record with an event of this time in seconds since the epoch."""
    return record(struct.pack("<Bd", 0x09, wall_time) + content)


def encode_scalars(step: int, seconds: float, values: Mapping[str, float]) -> bytes:
    """Return an event with scalars, as float32.

    Args:
        step: the step.
        seconds: time since the epoch.
        values: value by tag; NaN and infinite values included.
    """
    with np.errstate(over="ignore"):
        numbers = np.fromiter(values.values(), np.float64, len(values)).astype("<f4").tobytes()
    parts = [
        _scalar_field(name, "") + numbers[4 * index : 4 * index + 4] for index, name in enumerate(values)
    ]
    return _summary_event(step, seconds, b"".join(parts))


_TEXT_METADATA = b"\x4a\x0a\x0a\x06\x0a\x04text\x20\x02"
"""``SummaryMetadata`` of a value for the plugin ``text``, with the data class of tensors."""

_ONE_STRING = b"\x08\x07\x12\x04\x12\x02\x08\x01"
"""Type and shape of a ``TensorProto`` with one string."""


def encode_text(step: int, seconds: float, tag: str, text: str) -> bytes:
    """Return an event with a text in Markdown.

    Args:
        step: the step.
        seconds: time since the epoch.
        tag: its tag; TensorBoard shows it with the suffix ``/text_summary``.
        text: the text.
    """
    content = text.encode("utf-8", "replace")
    tensor = _ONE_STRING + b"\x42" + _varint(len(content)) + content
    value = _tag_field(tag, "/text_summary") + b"\x42" + _varint(len(tensor)) + tensor + _TEXT_METADATA
    return _summary_event(step, seconds, b"\x0a" + _varint(len(value)) + value)


def _summary_event(step: int, seconds: float, summary: bytes) -> bytes:
    return _event(seconds, b"\x10" + _varint(step) + b"\x2a" + _varint(len(summary)) + summary)


class EventFile:
    """One event file, open for appending. Every complete record is in the file at once, without a buffer in this process."""

    def __init__(self, folder: Path, label: str, first_step: int | None = None) -> None:
        """Create a file in a folder, which is created if missing.

        Args:
            folder: the folder.
            label: part of the file's name.
            first_step: TensorBoard discards what earlier files of the folder contain from this step on; None for nothing.

        Raises:
            OSError: the file cannot be created.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in alphabetical order.
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{rest:09d}.{label}"
        self.path, self._descriptor = _created(folder, name)
        self._inode = os.fstat(self._descriptor).st_ino
        self._size = 0
        version = b"brain.Event:2"
        head = _event(time.time(), b"\x1a" + _varint(len(version)) + version)
        if first_step is not None:
            head += _event(time.time(), b"\x10" + _varint(first_step) + b"\x3a\x02\x08\x01")
        try:
            self.append(head)
        except OSError:
            self.close()
            with suppress(OSError):
                self.path.unlink()
            raise

    def append(self, data: bytes) -> None:
        """Append records. If they cannot be written completely, none of them remains in the file.

        Raises:
            OSError: they cannot be written, or the file was removed.
        """
        if self.path.stat().st_ino != self._inode:
            raise FileNotFoundError(f"event file {self.path} was replaced")
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _created(folder: Path, name: str) -> tuple[Path, int]:
    number = 0
    while True:
        path = folder / (f"{name}.{number}" if number else name)
        try:
            return path, os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
        except FileExistsError:
            number += 1
