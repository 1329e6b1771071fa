"""One Parquet object of statistics on the store, of which only the columns that are asked for are fetched."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from watchstep.errors import FormatError
from watchstep.parquet_claims import Footer, claims_of, read_footer
from watchstep.segment import CATALOGUE, MAX_BYTES, MAX_ROWS, catalogue_of, check_version, whole
from watchstep.segment_checks import check_claims, checked_columns
from watchstep.store import Store
from watchstep.tensors import TensorInfo

if TYPE_CHECKING:
    import pyarrow as pa

_WHOLE = 256 * 1024
"""Objects up to this are fetched whole: a second request costs more than the bytes."""

_TAIL = 64 * 1024
"""What is fetched of a larger one at first: room for the footer and the catalogue of some 2,000 tensors."""

_GAP = 64 * 1024
"""Bytes between two columns that are fetched with them rather than asked for around."""


class Catalogues:
    """Catalogues by their packed bytes: most segments of a run carry the same."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[TensorInfo, ...]] = {}
        self._lock = threading.Lock()

    def read(self, packed: bytes) -> tuple[TensorInfo, ...]:
        """The catalogue; one object for equal bytes."""
        with self._lock:
            if packed not in self._known:
                self._known[packed] = catalogue_of(packed)
            return self._known[packed]


@dataclass(frozen=True)
class ParquetObject:
    """What is known of the object before a column is read.

    Attributes:
        key: of the object.
        size: its bytes.
        rows: its rows.
        first: its smallest step; 0 where it has no row.
        last: its largest step; -1 where it has no row.
        columns: names of the columns that can be read.
        catalogue: the tensors that its rows speak of.
    """

    store: Store
    key: str
    size: int
    rows: int
    first: int
    last: int
    columns: frozenset[str]
    catalogue: tuple[TensorInfo, ...]
    footer: Footer
    parsed: Any

    def read(self, columns: Iterable[str]) -> pa.Table:
        """Some columns; sizes are checked before memory is taken.

        Raises:
            FormatError: the object is damaged.
            NotFoundError, StoreError: it is gone, or cannot be read.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        chosen = sorted(set(columns))
        data = bytearray(self.size)  # zeros cost no memory until they are written
        for start, length in self._ranges(frozenset(chosen)):
            data[start : start + length] = self.store.get_range(self.key, start, length)
        with whole(self.key):
            check_claims(claims_of(data, self.footer, frozenset(chosen)), chosen)
            file = pq.ParquetFile(
                pa.BufferReader(pa.py_buffer(data)), metadata=self.parsed, page_checksum_verification=True
            )
            return file.read(chosen, use_threads=False)

    def _ranges(self, columns: frozenset[str]) -> list[tuple[int, int]]:
        if self.size <= _WHOLE:
            return [(0, self.size)]
        wanted = sorted(
            (chunk.start, chunk.length)
            for chunk in self.footer.chunks
            if chunk.length and chunk.path.removesuffix(".list.element") in columns
        )
        joined: list[tuple[int, int]] = []
        for start, length in wanted:
            if joined and start - sum(joined[-1]) <= _GAP:
                before, held = joined.pop()
                joined.append((before, max(held, start + length - before)))
            else:
                joined.append((start, length))
        return joined


def open_object(store: Store, key: str, size: int, catalogues: Catalogues) -> ParquetObject:
    """Read an object's footer.

    Raises:
        FormatError: it is damaged, too large, or of a later version.
        NotFoundError, StoreError: it is gone, or cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not 12 <= size <= MAX_BYTES:
        raise FormatError(f"segment {key}: {size} bytes, of 12 to {MAX_BYTES}", "read the run without it")
    data = _with_footer(store, key, size)
    with whole(key):
        footer = read_footer(data)
        check_version(footer.metadata, key)
        catalogue = catalogues.read(footer.metadata[CATALOGUE])
        if not 0 <= footer.rows <= MAX_ROWS:
            raise ValueError(f"claims {footer.rows} rows")
        file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(data)))
        columns = frozenset(checked_columns(file.schema_arrow))
        first, last = _reach([chunk for chunk in footer.chunks if chunk.path == "step" and chunk.values])
        return ParquetObject(
            store, key, size, footer.rows, first, last, columns, catalogue, footer, file.metadata
        )


def _with_footer(store: Store, key: str, size: int) -> bytearray:
    data = bytearray(size)
    data[:4] = b"PAR1"
    start = 0 if size <= _WHOLE else size - _TAIL
    data[start:] = _exactly(store, key, start, size - start)
    due = int.from_bytes(data[-8:-4], "little") + 8
    if due > size - start and due <= size:
        data[size - due : start] = _exactly(store, key, size - due, start - size + due)
    return data


def _exactly(store: Store, key: str, start: int, length: int) -> bytes:
    held = store.get_range(key, start, length)
    if len(held) != length:
        raise FormatError(f"segment {key}: shorter than it was listed", "list the run anew")
    return held


def _reach(chunks: Sequence[Any]) -> tuple[int, int]:
    """Smallest and largest step, by the statistics that every segment's footer carries."""
    if not chunks:
        return 0, -1
    if any(chunk.least is None or chunk.most is None for chunk in chunks):
        raise ValueError("its footer does not say which steps it holds")
    least = [int.from_bytes(chunk.least, "little", signed=True) for chunk in chunks]
    most = [int.from_bytes(chunk.most, "little", signed=True) for chunk in chunks]
    return min(least), max(most)
