"""One segment of an attempt on the store, as Arrow IPC. Only requested columns are fetched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from watchstep.errors import FormatError
from watchstep.format import ipc, segment
from watchstep.format.block import STAGES, from_codes, from_numbers
from watchstep.format.parquet.table import histogram_columns
from watchstep.format.segment_checks import CONSTANT, HISTOGRAM_COLUMNS, MAX_BYTES, PROBE, check_steps, whole
from watchstep.format.statistics import VALUE_COLUMNS
from watchstep.format.tensors import MODES, TensorInfo
from watchstep.reading.parquet_object import MAX_WHOLE_BYTES, Catalogues, buffer_of, exactly, joined_ranges
from watchstep.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

_HEAD_BYTES = 64 * 1024
"""First request for a larger object: room for the catalogue of some 2,000 tensors and the places of the columns."""

_HEADER_BYTES, _COLUMN_BYTES = 4096, 128
"""Memory of an open object, and of each of its columns, rounded up."""

_WORDS: Mapping[str, tuple[str, ...]] = {"mode": MODES, "stage": STAGES}
_VALUE_BYTES, _BIN_BYTES = 8, 10


@dataclass(frozen=True)
class ArrowObject:
    """An object with its header, before a column is read; with the interface of `ParquetObject`.

    Attributes:
        key: the object's key.
        size: its size in bytes.
        rows: number of rows.
        first: its smallest step; 0 without rows.
        last: its largest step; -1 without rows.
        columns: names of the readable columns.
        catalogue: the tensors of its rows.
        constant: columns with the same value in all rows, and the value (for words, the index); they need not be read.
    """

    store: Store
    key: str
    size: int
    rows: int
    first: int
    last: int
    columns: frozenset[str]
    catalogue: tuple[TensorInfo, ...]
    constant: Mapping[str, int]
    header: segment.Header

    @property
    def memory(self) -> int:
        """Approximate memory in bytes while its run is open."""
        return _HEADER_BYTES + _COLUMN_BYTES * len(self.columns)

    def decoded_bytes(self, columns: Iterable[str]) -> int:
        """Return the memory of columns once they are read, according to the header."""
        chosen = frozenset(columns)
        bins = self.header.histogram_values if chosen & HISTOGRAM_COLUMNS else 0
        return min(MAX_BYTES, _VALUE_BYTES * self.rows * len(chosen) + _BIN_BYTES * bins)

    def read(self, columns: Iterable[str]) -> pa.Table:
        """Read columns; sizes are checked before memory is allocated.

        Raises:
            FormatError: the object is damaged.
            NotFoundError, StoreError: it does not exist, or cannot be read.
        """
        return self.fetch(columns)()

    def fetch(self, columns: Iterable[str]) -> Callable[[], pa.Table]:
        """Fetch columns from the store.

        Returns:
            A function that decodes them; raises like `read`.

        Raises:
            NotFoundError, StoreError: it does not exist, or cannot be read.
        """
        chosen = sorted(set(columns))
        ranges = self._ranges(chosen)
        return partial(self._decode, chosen, ranges, self.store.get_ranges(self.key, ranges))

    def _ranges(self, columns: Iterable[str]) -> list[tuple[int, int]]:
        if self.size <= MAX_WHOLE_BYTES:
            return [(0, self.size)]
        names = set(columns)
        ranges = []
        if names & HISTOGRAM_COLUMNS:
            names = names - HISTOGRAM_COLUMNS | {segment.LENGTHS}
            ranges.append((self.header.histograms_at, self.size - self.header.histograms_at))
        located = (self.header.location(name) for name in names)
        ranges += [place for place in located if place is not None and place[1]]
        return joined_ranges(ranges)

    def _decode(
        self, chosen: list[str], ranges: list[tuple[int, int]], fetched: Iterable[memoryview]
    ) -> pa.Table:
        import pyarrow as pa

        data = buffer_of(self.size)
        arrays: dict[str, Any] = {}
        with whole(self.key):
            for (start, length), piece in zip(ranges, fetched, strict=True):
                data[start : start + length] = piece
            for name in chosen:
                if name not in HISTOGRAM_COLUMNS:
                    arrays[name] = self._array(name, data)
            if HISTOGRAM_COLUMNS & {*chosen}:
                arrays.update(histogram_columns(segment.histograms(data, self.header)))
            return pa.table({name: arrays[name] for name in chosen})

    def _array(self, name: str, data: memoryview) -> Any:
        values = segment.column(data, self.header, name)
        if name == "step":
            check_steps(values, self.first, self.last)
        if name == "tensor":
            segment.check_codes(name, values, len(self.catalogue))
            return from_codes(values, [info.name for info in self.catalogue])
        if name in _WORDS:
            return from_codes(values, _WORDS[name])
        return from_numbers(values, nan_is_null=name in VALUE_COLUMNS or name.startswith(PROBE))


def open_segment(store: Store, key: str, size: int, catalogues: Catalogues) -> ArrowObject:
    """Read a segment's header.

    Raises:
        FormatError: it is damaged, too large, or has another version.
        NotFoundError, StoreError: it does not exist, or cannot be read.
    """
    if not 0 < size <= MAX_BYTES:
        raise FormatError(
            f"segment {key} has {size} bytes instead of 1 to {MAX_BYTES}", "read the run without it"
        )
    data = exactly(store, key, 0, size if size <= MAX_WHOLE_BYTES else _HEAD_BYTES)
    with whole(key):
        header = _header(store, key, size, data)
        header.check_size(size)
        catalogue = catalogues.read(header.packed_catalogue)
        if header.rows and not 0 <= header.first <= header.last:
            raise ValueError(f"claims steps {header.first} to {header.last}")
        # The catalogue is shared by all segments of the run, and the rest of the metadata is not used any more.
        kept = replace(
            header,
            packed_catalogue=b"",
            schema=ipc.Schema(header.schema.columns, {}),
            batch=replace(header.batch, metadata={}),
        )
        return ArrowObject(
            store=store,
            key=key,
            size=size,
            rows=header.rows,
            first=header.first,
            last=header.last,
            columns=frozenset(map(sys.intern, header.columns)) | HISTOGRAM_COLUMNS,
            catalogue=catalogue,
            constant={
                name: value for name, value in header.constant.items() if name in CONSTANT or value == 0
            },
            header=kept,
        )


def _header(store: Store, key: str, size: int, data: bytes) -> segment.Header:
    while True:
        try:
            return segment.read_header(data, key)
        except ipc.TruncatedError as error:
            if not len(data) < error.required <= size:
                raise
            data = exactly(store, key, 0, error.required)


__all__ = ["ArrowObject", "open_segment"]
