"""One Parquet object of statistics on the store, of which only the columns that are asked for are fetched."""

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
from watchstep.format.parquet_claims import Chunk, Footer, claims_of, is_chosen, read_footer
from watchstep.format.segment import (
    CATALOGUE,
    CONSTANT,
    MAX_BYTES,
    MAX_ROWS,
    WORD_COLUMNS,
    catalogue_of,
    check_claims,
    check_leaves,
    check_version,
    checked_columns,
    whole,
)
from watchstep.format.tensors import MODES, TensorInfo
from watchstep.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

_WHOLE = 256 * 1024
"""Objects up to this are fetched whole: a second request costs more than the bytes."""

_TAIL = 64 * 1024
"""What is fetched of a larger one at first: room for the footer and the catalogue of some 2,000 tensors."""

_WORDS: dict[str, tuple[str, ...]] = {"mode": MODES, "stage": STAGES}

_MOST_CATALOGUES = 256 * 1024 * 1024
"""Bytes of memory for the catalogues of one run: some 300,000 different tensors."""

_MOST_PARSED = 32 * 1024 * 1024
"""Bytes of footers of one run that are kept as pyarrow has parsed them, in several times as much memory."""

_FOOTER_BYTES, _CHUNK_BYTES = 4096, 512
"""Memory of an object that is known, and of each of its columns: measured with `tracemalloc`, and rounded up."""

_PLACE_BYTES = 8

_VALUE_BYTES = 8
"""Of a number; words and bins take less."""

_GAP = 64 * 1024
"""Bytes between two columns that are fetched with them rather than asked for around."""


class Catalogues:
    """Catalogues of one run by their packed bytes: most segments of a run carry the same.

    They stay in memory as long as the run is open, and share equal tensors. What they take together is bounded.
    """

    def __init__(self, most_bytes: int = _MOST_CATALOGUES) -> None:
        self._catalogues: dict[bytes, tuple[TensorInfo, ...]] = {}
        self._tensors: dict[TensorInfo, TensorInfo] = {}
        self._left = most_bytes
        self._parsed_left = _MOST_PARSED
        self._lock = threading.Lock()

    def read(self, packed: bytes) -> tuple[TensorInfo, ...]:
        """The catalogue; one object for equal bytes.

        Raises:
            ValueError, TypeError, KeyError, zlib.error: it is none, is over the limit of one catalogue, or does not fit into
                the memory for all.
        """
        with self._lock:
            if packed not in self._catalogues:
                self._catalogues[packed] = self._shared(packed)
            return self._catalogues[packed]

    def keeps_parsed(self, size: int) -> bool:
        """Whether a parsed footer of so many bytes may stay in memory; takes the room for it."""
        with self._lock:
            if size > self._parsed_left:
                return False
            self._parsed_left -= size
            return True

    def _shared(self, packed: bytes) -> tuple[TensorInfo, ...]:
        catalogue = catalogue_of(packed)
        new = {info for info in catalogue if info not in self._tensors}
        needed = len(packed) + _PLACE_BYTES * len(catalogue) + sum(info.memory for info in new)
        if needed > self._left:
            raise ValueError("the descriptions of the tensors of all segments together are over the limit")
        self._left -= needed
        return tuple(self._tensors.setdefault(info, info) for info in catalogue)


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
        constant: columns with one value in all rows, and the value (of words, the index); they need not be read.
        footer: where its columns lie; without its metadata.
        footer_size: bytes of the footer and its length.
        footer_digest: of these bytes.
        parsed: pyarrow's footer; None where it is parsed again with each read.
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
        """Bytes that it takes while its run is open, about."""
        return _FOOTER_BYTES + _CHUNK_BYTES * len(self.footer.chunks)

    def decoded_bytes(self, columns: Iterable[str]) -> int:
        """Memory that some columns take once they are read, by what the footer says of their values.

        `read` refuses an object whose pages claim more than `MAX_BYTES`.
        """
        chosen = frozenset(columns)
        values = sum(chunk.values for chunk in self.footer.chunks if is_chosen(chunk.path, chosen))
        return min(MAX_BYTES, _VALUE_BYTES * values)

    def read(self, columns: Iterable[str]) -> pa.Table:
        """Some columns; sizes are checked before memory is taken.

        Raises:
            FormatError: the object is damaged.
            NotFoundError, StoreError: it is gone, or cannot be read.
        """
        return self.fetch(columns)()

    def fetch(self, columns: Iterable[str]) -> Callable[[], pa.Table]:
        """Fetch some columns from the store.

        Returns:
            decodes them; raises as `read`.

        Raises:
            NotFoundError, StoreError: it is gone, or cannot be read.
        """
        chosen = sorted(set(columns))
        ranges = self._ranges(frozenset(chosen))
        return partial(self._decode, chosen, ranges, self.store.get_ranges(self.key, ranges))

    def _decode(
        self, chosen: list[str], ranges: list[tuple[int, int]], fetched: Sequence[memoryview]
    ) -> pa.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        data = _room(self.size)
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
        if self.size <= _WHOLE:
            return [(0, self.size)]
        wanted = sorted(
            (chunk.start, chunk.length)
            for chunk in self.footer.chunks
            if chunk.length and is_chosen(chunk.path, columns)
        )
        if self.parsed is None:
            wanted.append((self.size - self.footer_size, self.footer_size))
        joined: list[tuple[int, int]] = []
        for start, length in wanted:
            if joined and start - sum(joined[-1]) <= _GAP:
                before, gap = joined.pop()
                joined.append((before, max(gap, start + length - before)))
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
        keeps = size > _WHOLE and catalogues.keeps_parsed(footer_size)
        return ParquetObject(
            store=store,
            key=key,
            size=size,
            rows=footer.rows,
            **_reach([chunk for chunk in footer.chunks if chunk.path == "step" and chunk.values]),
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
    """What reading columns needs. A run has many objects, and their metadata are mostly one catalogue, over and over."""
    chunks = [replace(chunk, path=sys.intern(chunk.path)) for chunk in footer.chunks]
    return Footer(footer.rows, chunks, [], {})


def _room(size: int) -> memoryview:
    """Memory for an object of which only parts are written. It is zeroed, so that no damaged file shows what lay there before."""
    return np.zeros(size, np.uint8).data


def _with_footer(store: Store, key: str, size: int) -> memoryview:
    data = _room(size)
    data[:4] = b"PAR1"
    start = 0 if size <= _WHOLE else size - _TAIL
    data[start:] = _exactly(store, key, start, size - start)
    due = int.from_bytes(data[-8:-4], "little") + 8
    if due > size - start and due <= size:
        data[size - due : start] = _exactly(store, key, size - due, start - size + due)
    return data


def _exactly(store: Store, key: str, start: int, length: int) -> bytes:
    data = store.get_range(key, start, length)
    if len(data) != length:
        raise FormatError(f"segment {key}: shorter than it was listed", "list the run anew")
    return data


def _constants(footer: Footer) -> dict[str, int]:
    """Columns of which the footer says that all rows hold one value, and it is one that they can hold."""
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


def _reach(chunks: Sequence[Chunk]) -> dict[str, int]:
    """Smallest and largest step, by the statistics that every segment's footer carries."""
    if not chunks:
        return {"first": 0, "last": -1}
    limits = [limit for chunk in chunks for limit in (chunk.least, chunk.most) if limit is not None]
    if len(limits) < 2 * len(chunks):
        raise ValueError("its footer does not say which steps it holds")
    steps = [int.from_bytes(limit, "little", signed=True) for limit in limits]
    return {"first": min(steps), "last": max(steps)}
