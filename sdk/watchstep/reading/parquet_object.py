"""One Parquet object of statistics on the store. Only requested columns are fetched."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from watchstep.errors import FormatError
from watchstep.format.block import STAGES
from watchstep.format.catalogue import CATALOGUE, catalogue_of, check_version
from watchstep.format.parquet.claims import Chunk, Footer, claims_of, is_chosen, read_footer
from watchstep.format.parquet.table import check_claims, check_leaves, checked_columns
from watchstep.format.segment_checks import CONSTANT, MAX_BYTES, MAX_ROWS, WORD_COLUMNS, whole
from watchstep.format.tensors import MODES, TensorInfo
from watchstep.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

MAX_WHOLE_BYTES = 256 * 1024
"""Objects up to this size are fetched as a whole, because a second request costs more than the bytes."""

_TAIL_BYTES = 64 * 1024
"""First request for a larger object: room for the footer and the catalogue of some 2,000 tensors."""

_WORDS: dict[str, tuple[str, ...]] = {"mode": MODES, "stage": STAGES}

_MAX_CATALOGUE_BYTES = 128 * 1024 * 1024
"""Memory limit of the catalogues of one run: some 150,000 different tensors."""

_MAX_PARSED_BYTES = 32 * 1024 * 1024
"""Limit of footer bytes of one run that are cached as parsed by pyarrow, which takes several times as much memory."""

_PARSED_FACTOR = 4

_FOOTER_BYTES, _CHUNK_BYTES = 4096, 512
"""Memory of an open object, and of each of its columns: measured with `tracemalloc`, and rounded up."""

_PLACE_BYTES = 8

_VALUE_BYTES = 8
"""Bytes of a number; words and bins take less."""

_GAP = 64 * 1024
"""Maximum gap in bytes between two columns that are fetched in one request."""


class Catalogues:
    """Catalogues of one run by their packed bytes, because most segments of a run have the same one.

    They stay in memory while the run is open, and share equal tensors. Their total size is bounded.
    """

    def __init__(self, max_bytes: int = _MAX_CATALOGUE_BYTES) -> None:
        self._catalogues: dict[bytes, tuple[TensorInfo, ...]] = {}
        self._tensors: dict[TensorInfo, TensorInfo] = {}
        self._remaining = self._limit = max_bytes
        self._parsed_remaining = _MAX_PARSED_BYTES
        self._lock = threading.Lock()

    def read(self, packed: bytes) -> tuple[TensorInfo, ...]:
        """Return the catalogue; the same object for equal bytes.

        Raises:
            ValueError, TypeError, KeyError, zlib.error: it is invalid, exceeds the limit of one catalogue, or does not fit into
                the memory for all.
        """
        with self._lock:
            if packed not in self._catalogues:
                self._catalogues[packed] = self._shared(packed)
            return self._catalogues[packed]

    @property
    def memory(self) -> int:
        """Approximate memory in bytes, that of parsed footers included, which take several times their size."""
        return self._limit - self._remaining + _PARSED_FACTOR * (_MAX_PARSED_BYTES - self._parsed_remaining)

    def keeps_parsed(self, size: int) -> bool:
        """Reserve memory for a parsed footer. Returns False if it does not fit."""
        with self._lock:
            if size > self._parsed_remaining:
                return False
            self._parsed_remaining -= size
            return True

    def _shared(self, packed: bytes) -> tuple[TensorInfo, ...]:
        catalogue = catalogue_of(packed)
        new = {info for info in catalogue if info not in self._tensors}
        needed = len(packed) + _PLACE_BYTES * len(catalogue) + sum(info.memory for info in new)
        if needed > self._remaining:
            raise ValueError("the tensor descriptions of all segments together exceed the limit")
        self._remaining -= needed
        return tuple(self._tensors.setdefault(info, info) for info in catalogue)


@dataclass(frozen=True)
class ParquetObject:
    """An object with its footer, before a column is read.

    Attributes:
        key: the object's key.
        size: its size in bytes.
        rows: number of rows.
        first: its smallest step; 0 without rows.
        last: its largest step; -1 without rows.
        columns: names of the readable columns.
        catalogue: the tensors of its rows.
        constant: columns with the same value in all rows, and the value (for words, the index); they need not be read.
        footer: locations of its columns, without metadata.
        footer_size: bytes of the footer and its length.
        footer_digest: digest of these bytes.
        parsed: pyarrow's footer; None if it is parsed again for each read.
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
    footer: Footer
    footer_size: int
    footer_digest: bytes
    parsed: Any

    @property
    def memory(self) -> int:
        """Approximate memory in bytes while its run is open."""
        return _FOOTER_BYTES + _CHUNK_BYTES * len(self.footer.chunks)

    def decoded_bytes(self, columns: Iterable[str]) -> int:
        """Return the memory of columns once they are read, according to the footer.

        `read` refuses an object whose pages claim more than `MAX_BYTES`.
        """
        chosen = frozenset(columns)
        values = sum(chunk.values for chunk in self.footer.chunks if is_chosen(chunk.path, chosen))
        return min(MAX_BYTES, _VALUE_BYTES * values)

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
        ranges = self._ranges(frozenset(chosen))
        return partial(self._decode, chosen, ranges, self.store.get_ranges(self.key, ranges))

    def _decode(
        self, chosen: list[str], ranges: list[tuple[int, int]], fetched: Sequence[memoryview]
    ) -> pa.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        data = buffer_of(self.size)
        with whole(self.key):
            for (start, length), piece in zip(ranges, fetched, strict=True):
                data[start : start + length] = piece
            if self.parsed is None and _digest(data[-self.footer_size :]) != self.footer_digest:
                raise ValueError("has changed since its footer was read")
            check_claims(claims_of(data, self.footer, frozenset(chosen)), chosen)
            file = pq.ParquetFile(
                pa.BufferReader(pa.py_buffer(data)),
                metadata=self.parsed,
                read_dictionary=list(WORD_COLUMNS),
                page_checksum_verification=True,
            )
            return file.read(chosen, use_threads=False)

    def _ranges(self, columns: frozenset[str]) -> list[tuple[int, int]]:
        if self.size <= MAX_WHOLE_BYTES:
            return [(0, self.size)]
        ranges = [
            (chunk.start, chunk.length)
            for chunk in self.footer.chunks
            if chunk.length and is_chosen(chunk.path, columns)
        ]
        if self.parsed is None:
            ranges.append((self.size - self.footer_size, self.footer_size))
        return joined_ranges(ranges)


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of an object as (start, length) in order, joined where little lies between them."""
    joined: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if joined and start - sum(joined[-1]) <= _GAP:
            before, gap = joined.pop()
            joined.append((before, max(gap, start + length - before)))
        else:
            joined.append((start, length))
    return joined


def open_object(store: Store, key: str, size: int, catalogues: Catalogues) -> ParquetObject:
    """Read an object's footer.

    Raises:
        FormatError: it is damaged, too large, or has a later version.
        NotFoundError, StoreError: it does not exist, or cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not 12 <= size <= MAX_BYTES:
        raise FormatError(
            f"segment {key} has {size} bytes instead of 12 to {MAX_BYTES}", "read the run without it"
        )
    data = _with_footer(store, key, size)
    footer_size = int.from_bytes(data[-8:-4], "little") + 8
    with whole(key):
        footer = read_footer(data)
        check_leaves(footer.leaves)
        check_version(footer.metadata, key)
        catalogue = catalogues.read(footer.metadata[CATALOGUE])
        if not 0 <= footer.rows <= MAX_ROWS:
            raise ValueError(f"claims {footer.rows} rows")
        file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(data)), read_dictionary=list(WORD_COLUMNS))
        columns = frozenset(map(sys.intern, checked_columns(file.schema_arrow)))
        keeps = size > MAX_WHOLE_BYTES and catalogues.keeps_parsed(footer_size)
        return ParquetObject(
            store=store,
            key=key,
            size=size,
            rows=footer.rows,
            **_step_range([chunk for chunk in footer.chunks if chunk.path == "step" and chunk.values]),
            columns=columns,
            catalogue=catalogue,
            constant=_constants(footer),
            footer=_without_metadata(footer),
            footer_size=footer_size,
            footer_digest=_digest(data[-footer_size:]),
            parsed=file.metadata if keeps else None,
        )


def _digest(footer: memoryview) -> bytes:
    return hashlib.blake2b(footer, digest_size=16).digest()


def _without_metadata(footer: Footer) -> Footer:
    """Drop what reading columns does not need. A run has many objects, whose metadata mostly repeat one catalogue."""
    chunks = [replace(chunk, path=sys.intern(chunk.path)) for chunk in footer.chunks]
    return Footer(footer.rows, chunks, [], {})


def buffer_of(size: int) -> memoryview:
    """Return memory for an object of which only parts are written. It is zeroed, so that a damaged file cannot expose old contents."""
    return np.zeros(size, np.uint8).data


def _with_footer(store: Store, key: str, size: int) -> memoryview:
    data = buffer_of(size)
    data[:4] = b"PAR1"
    start = 0 if size <= MAX_WHOLE_BYTES else size - _TAIL_BYTES
    data[start:] = exactly(store, key, start, size - start)
    footer_size = int.from_bytes(data[-8:-4], "little") + 8
    if footer_size > size - start and footer_size <= size:
        data[size - footer_size : start] = exactly(store, key, size - footer_size, start - size + footer_size)
    return data


def exactly(store: Store, key: str, start: int, length: int) -> bytes:
    """Fetch a range of an object.

    Raises:
        FormatError: the object is shorter.
        NotFoundError, StoreError: it does not exist, or cannot be read.
    """
    data = store.get_range(key, start, length)
    if len(data) != length:
        raise FormatError(f"segment {key} is shorter than listed", "list the run again")
    return data


def _constants(footer: Footer) -> dict[str, int]:
    """Return columns whose footer statistics state one valid value for all rows."""
    constants: dict[str, int] = {}
    for name in CONSTANT:
        chunks = [chunk for chunk in footer.chunks if chunk.path == name and chunk.values]
        limits = {limit for chunk in chunks for limit in (chunk.least, chunk.most)}
        value = limits.pop() if len(limits) == 1 else None
        if value is None:
            continue
        if name not in _WORDS:
            constants[name] = int.from_bytes(value, "little", signed=True)
        elif value in (words := [word.encode() for word in _WORDS[name]]):
            constants[name] = words.index(value)
    return constants


def _step_range(chunks: Sequence[Chunk]) -> dict[str, int]:
    """Return the smallest and largest step, from the statistics in the footer."""
    if not chunks:
        return {"first": 0, "last": -1}
    limits = [limit for chunk in chunks for limit in (chunk.least, chunk.most) if limit is not None]
    if len(limits) < 2 * len(chunks):
        raise ValueError("its footer does not state its steps")
    steps = [int.from_bytes(limit, "little", signed=True) for limit in limits]
    return {"first": min(steps), "last": max(steps)}
