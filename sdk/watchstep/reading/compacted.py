"""Compacted runs: the manifest, the segments that it lists, and the generation that readers follow.

The manifest lists which objects contain which rows. It is written last, so that it lists complete objects only. Readers follow the newest
complete generation that was not found damaged. A segment's footer is read when one of its columns is first requested.
"""

from __future__ import annotations

import json
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.format.block import STAGES, from_codes, from_numbers
from watchstep.format.documents import memory_needed, parse_json
from watchstep.format.layout import SCHEMA_VERSION, check_schema
from watchstep.format.segment import check_constants
from watchstep.format.segment_checks import MAX_BYTES, MAX_ROWS, whole
from watchstep.format.tensors import MODES, TensorInfo
from watchstep.reading.budget import LONG_TEXTS, ReadBudget
from watchstep.reading.parquet_object import Catalogues, ParquetObject, open_object
from watchstep.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa


COMPACTED = "compacted/"
MAX_MANIFEST = 64 * 1024 * 1024
_MAX_MEMORY = 96 * 1024 * 1024
"""A manifest of a million segments takes this: some 200 bytes for each. One that is larger is not used, and the segments are read."""

_GENERATION = re.compile(r"compacted/([0-9]{10})/(.+)")


@dataclass(frozen=True)
class CompactedSegment:
    """One object, ordered by (tensor, step), worker and mode.

    Attributes:
        key: key of the object, relative to the run.
        size: its size in bytes.
        first: its smallest step.
        last: its largest step.
        tensors: (index in the attempt's catalogue, number of rows) of each tensor, in the object's order.
        columns: names of its columns.
        constant: columns with the same value in all rows, and the value; they need not be read.
    """

    key: str
    size: int
    first: int
    last: int
    tensors: tuple[tuple[int, int], ...]
    columns: tuple[str, ...]
    constant: Mapping[str, int]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(rows for _, rows in self.tensors)


@dataclass(frozen=True)
class CompactedAttempt:
    """One attempt's objects.

    Attributes:
        attempt: its id.
        started_ns: time of its first record.
        catalogue: packed as by `watchstep.format.catalogue.catalogue_bytes`.
        segments: all rows.
        recent: a copy of the rows of the last steps, from its ``first`` on, so that reading the newest step takes one object.
    """

    attempt: str
    started_ns: int
    catalogue: str
    segments: tuple[CompactedSegment, ...]
    recent: CompactedSegment | None = None


@dataclass(frozen=True)
class Manifest:
    """The result of one compaction.

    Attributes:
        generation: its number.
        created_ns: nanoseconds since the epoch.
        sources: keys of the segments that it includes.
        attempts: in the order in which they started.
    """

    generation: int
    created_ns: int
    sources: tuple[str, ...]
    attempts: tuple[CompactedAttempt, ...]
    schema: int = SCHEMA_VERSION


def manifest_key(generation: int) -> str:
    """Return the key of a generation's manifest, relative to the run."""
    return f"{COMPACTED}{generation:010d}/manifest.json"


def generation_of(key: str) -> tuple[int, str] | None:
    """Return the generation and name of an object below ``compacted/``; None for other keys."""
    match = _GENERATION.fullmatch(key)
    return (int(match[1]), match[2]) if match else None


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest."""
    return json.dumps(asdict(manifest), separators=(",", ":")).encode()


def decode(data: bytes, name: str) -> Manifest:
    """Decode a manifest.

    Raises:
        FormatError: the data is invalid, or has another version.
    """
    try:
        document = parse_json(data, _MAX_MEMORY)
        check_schema(name, int(document["schema"]))
        attempts = tuple(attempt_from_data(entry) for entry in document["attempts"])
        return Manifest(
            int(document["generation"]),
            int(document["created_ns"]),
            tuple(map(_text_of, document["sources"])),
            attempts,
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{name} is not a manifest ({error})", "compact the run again") from error


def _text_of(source: Any) -> str:
    if type(source) is not str:
        raise TypeError(f"a source of type {type(source).__name__}")
    return source


def attempt_from_data(data: dict[str, Any]) -> CompactedAttempt:
    """Parse one attempt of a manifest.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, OverflowError: the data has another form.
    """
    recent = data["recent"]
    return CompactedAttempt(
        str(data["attempt"]),
        int(data["started_ns"]),
        str(data["catalogue"]),
        tuple(_segment(entry) for entry in data["segments"]),
        None if recent is None else _segment(recent),
    )


def _segment(entry: dict[str, Any]) -> CompactedSegment:
    segment = CompactedSegment(
        str(entry["key"]),
        int(entry["size"]),
        int(entry["first"]),
        int(entry["last"]),
        tuple((int(place), int(rows)) for place, rows in entry["tensors"]),
        tuple(str(name) for name in entry["columns"]),
        {str(name): int(value) for name, value in entry["constant"].items()},
    )
    is_invalid = any(place < 0 or rows < 1 for place, rows in segment.tensors)
    if is_invalid or segment.rows > MAX_ROWS or not 0 < segment.size <= MAX_BYTES:
        raise ValueError(f"segment {segment.key[:80]!r} has an invalid size")
    if generation_of(segment.key) is None or ".." in segment.key:
        raise ValueError(f"segment {segment.key[:80]!r} is outside of the compacted folder")
    if len({place for place, _ in segment.tensors}) < len(segment.tensors):
        raise ValueError(f"segment {segment.key[:80]!r} names a tensor twice")
    check_constants(segment.constant)
    return segment


_WORDS: dict[str, tuple[str, ...]] = {"mode": MODES, "stage": STAGES}


class CompactedSegmentLostError(StoreError):
    """A segment of a manifest is missing or damaged: the run must be read from another generation."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(what, "compact the run again")
        self.key = key


class CompactedObject:
    """A compacted segment, with the interface of `ParquetObject` for readers."""

    def __init__(
        self,
        store: Store,
        segment: CompactedSegment,
        catalogue: tuple[TensorInfo, ...],
        catalogues: Catalogues,
    ) -> None:
        self._store, self._segment, self._catalogues = store, segment, catalogues
        self._opened: ParquetObject | None = None
        self._lock = threading.Lock()
        self.key, self.rows, self.first, self.last = segment.key, segment.rows, segment.first, segment.last
        self.columns = frozenset(segment.columns)
        self.constant = segment.constant
        self.catalogue = tuple(catalogue[place] for place, _ in segment.tensors)

    def decoded_bytes(self, columns: Iterable[str]) -> int:
        """Return the memory that columns take once they are read.

        Raises:
            CompactedSegmentLostError: the object is missing, damaged, or differs from the manifest.
            StoreError: it cannot be read.
        """
        with self._translated():
            return self._open().decoded_bytes(columns)

    def fetch(self, columns: Iterable[str]) -> Callable[[], pa.Table]:
        """Fetch columns from the store.

        Returns:
            A function that decodes them; raises `CompactedSegmentLostError` if the object is damaged.

        Raises:
            CompactedSegmentLostError: the object is missing, damaged, or differs from the manifest.
            StoreError: it cannot be read.
        """
        constant = {*self._segment.constant, "tensor"}
        requested = set(columns)
        with self._translated():
            decode = self._open().fetch((requested - constant) or {"step"})

        def table() -> pa.Table:
            with self._translated():
                decoded = decode()
                for name in sorted(requested & constant):
                    decoded = decoded.append_column(name, self._constant(name))
                return decoded

        return table

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            with whole(self.key):
                yield
        except (FormatError, NotFoundError) as error:
            raise CompactedSegmentLostError(self.key, error.what) from error

    def places(self) -> NDArray[np.int32]:
        """Return the index of each row's tensor in the segment's catalogue, without reading."""
        counts = [rows for _, rows in self._segment.tensors]
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    def _open(self) -> ParquetObject:
        with self._lock:
            if self._opened is None:
                opened = open_object(self._store, self.key, self._segment.size, self._catalogues)
                if opened.rows != self.rows or self.columns != opened.columns:
                    raise FormatError(
                        f"segment {self.key} does not match the manifest", "compact the run again"
                    )
                self._opened = opened
            return self._opened

    def _constant(self, name: str) -> Any:
        if name == "tensor":
            return from_codes(self.places(), [info.name for info in self.catalogue])
        values = np.full(self.rows, self.constant[name], np.int32)
        return from_codes(values, _WORDS[name]) if name in _WORDS else from_numbers(values)


@dataclass(frozen=True)
class Compacted:
    """One attempt of the generation in use.

    Attributes:
        started_ns: time of its first record.
        catalogue: its tensors, in the order of their first occurrence.
        objects: all rows.
        recent: a copy of the rows of the last steps.
    """

    started_ns: int
    catalogue: tuple[TensorInfo, ...]
    objects: list[CompactedObject]
    recent: CompactedObject | None


_MAX_TRIED = 3
"""Number of manifests to try at once. A compaction writes its manifest last and deletes older generations, so the newest is almost always complete."""


class Generations:
    """The manifest in use, and its attempts.

    Attributes:
        manifest: None without a compaction.
        attempts: attempt → its objects.
        sources: keys of the segments that it includes.
        memory: approximate memory of it in bytes.
    """

    def __init__(self, store: Store, catalogues: Catalogues) -> None:
        self._store = store
        self._catalogues = catalogues
        self._distrusted: set[int] = set()
        self.manifest: Manifest | None = None
        self.attempts: dict[str, Compacted] = {}
        self.sources: frozenset[str] = frozenset()
        self.memory = 0

    def refresh(self, budget: ReadBudget | None = None) -> bool:
        """Look for a newer generation. Returns whether another one is in use now.

        Of unreadable manifests only the newest three are tried; the next call tries the next three.

        Args:
            budget: the query's budget, checked between two manifests.

        Raises:
            StoreError: the store cannot be read.
            OverBudgetError: the time limit is exceeded.
        """
        before = self.manifest and self.manifest.generation
        generations = [
            match[0]
            for entry in self._store.entries(COMPACTED)
            if (match := generation_of(entry.key)) and match[1] == "manifest.json"
        ]
        newest = sorted(set(generations) - self._distrusted, reverse=True)
        for generation in newest[:_MAX_TRIED]:
            if budget is not None:
                budget.check()
            if generation == before or self._follow(generation, budget):
                return generation != before
            self._distrusted.add(generation)
        self.manifest, self.attempts, self.sources, self.memory = None, {}, frozenset(), 0
        return before is not None

    def distrust(self) -> None:
        """Never use the current generation again."""
        if self.manifest is not None:
            self._distrusted.add(self.manifest.generation)

    def missing(self) -> set[str]:
        """Return the keys of objects of the current generation that the store does not have.

        Raises:
            StoreError: the store cannot be read.
        """
        stored = {entry.key for entry in self._store.entries(COMPACTED)}
        objects = (part for attempt in self.attempts.values() for part in (*attempt.objects, attempt.recent))
        return {part.key for part in objects if part is not None} - stored

    def _follow(self, generation: int, budget: ReadBudget | None) -> bool:
        key = manifest_key(generation)
        try:
            data = self._store.get(key, limit=MAX_MANIFEST)
            with LONG_TEXTS.turn(len(data), budget):
                manifest = decode(data, key)
            if manifest.generation != generation:
                return False  # a generation that is distrusted must not come back under another number
            attempts = {}
            for attempt in manifest.attempts:
                if budget is not None:
                    budget.check()
                catalogue = self._catalogues.read(attempt.catalogue.encode())
                objects = [
                    CompactedObject(self._store, segment, catalogue, self._catalogues)
                    for segment in attempt.segments
                ]
                recent = None
                if attempt.recent is not None:
                    recent = CompactedObject(self._store, attempt.recent, catalogue, self._catalogues)
                attempts[attempt.attempt] = Compacted(attempt.started_ns, catalogue, objects, recent)
        except (FormatError, NotFoundError, ValueError, TypeError, LookupError, zlib.error):
            return False
        self.manifest, self.attempts, self.sources = manifest, attempts, frozenset(manifest.sources)
        self.memory = memory_needed(data)
        return True
