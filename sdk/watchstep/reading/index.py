"""The index of a run: which object holds which statistics, and reading columns of them with a few objects prefetched."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.block import Block, concatenate
from watchstep.format.layout import SEGMENTS, SegmentKey
from watchstep.format.segment import PROBE, check_columns, check_steps, to_block, whole
from watchstep.format.tensors import TensorInfo
from watchstep.reading.budget import PROCESS, ReadBudget
from watchstep.reading.columns import (
    IDENTITY,
    NO_CUT,
    Columns,
    Located,
    Scan,
    Want,
    constants,
    from_table,
    is_one_of,
    joined,
)
from watchstep.reading.compacted import (
    CompactedObject,
    CompactedSegmentLostError,
    Generations,
    Manifest,
    generation_of,
)
from watchstep.reading.parquet_object import Catalogues, ParquetObject, open_object
from watchstep.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa


_OF_A_BUCKET = 16
"""Objects of a bucket that are fetched at once: most of the time is waiting for its answers."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def readers_of(store: Store) -> int:
    """How many objects of a store are read at once. More threads than cores only pass the GIL around for a folder."""
    return min(_OF_A_BUCKET, max(2, os.cpu_count() or 1)) if store.is_local else _OF_A_BUCKET


def prefetch(work: Callable[[Item], Result], items: Iterable[Item], readers: int) -> Iterator[Result]:
    """The results in order. Twice ``readers`` are under way or waiting at the most, so that memory is bounded."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(readers, "watchstep-reader") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= 2 * readers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


_COPIES = 2
"""How many times the rows of blocks are in memory: as a table and as a block; later as blocks and as the one they become."""


class RunIndex:
    """The objects of a run that hold statistics. Footers are kept, columns are not.

    Attributes:
        damaged: segments that could not be read, and why; what others hold is there all the same.
        budget: what the present question may take; None where nothing bounds it.
    """

    def __init__(self, store: Store, budget: ReadBudget | None = None) -> None:
        self._store = store
        self._readers = readers_of(store)
        self._segments: dict[SegmentKey, ParquetObject] = {}
        self._catalogues = Catalogues()
        self._generations = Generations(store, self._catalogues)
        self._started: dict[str, int] = {}
        self.damaged: dict[str, str] = {}
        self.budget = budget
        self._forget()

    def _forget(self) -> None:
        self._view: list[Located] | None = None
        self._tensors: list[TensorInfo] | None = None

    def snapshot(self, budget: ReadBudget | None = None) -> RunIndex:
        """The index as it is now, to read by another thread while this one is refreshed.

        Args:
            budget: what the reader may take.
        """
        self.tensors(), self.objects()  # found, and the copy's from now on
        copied = copy(self)
        copied._generations = copy(self._generations)  # noqa: SLF001 - of the same class
        copied.budget = budget
        return copied

    def exclude(self, damaged: Mapping[str, str]) -> None:
        """Leave out segments that another reader has found to be damaged.

        Args:
            damaged: segment's path → why.
        """
        new = {path: why for path, why in damaged.items() if path not in self.damaged}
        if new:
            self.damaged.update(new)
            self._segments = {key: segment for key, segment in self._segments.items() if key.path not in new}
            self._forget()

    def refresh(self) -> bool:
        """Look for new segments and read their footers; whether there were any.

        Raises:
            StoreError: the store cannot be read.
        """
        listed = self._listed()  # before the manifest: one that came later only covers more of them
        followed = self._generations.refresh(self.budget)
        self._segments = {key: segment for key, segment in self._segments.items() if not self._covers(key)}
        segments = self._segments
        new = [k for k in listed if k not in segments and k.path not in self.damaged and not self._covers(k)]
        opened = prefetch(lambda key: self._opened(key, listed[key]), new, self._readers)
        for key, found in zip(new, opened, strict=True):
            if found is not None:
                self._segments[key] = found
            self._spend()
        if any(key not in self._segments and key.path not in self.damaged for key in new):
            return self.refresh() or True  # one was deleted since it was listed: a newer generation has it
        if new or followed:
            self._forget()
        return bool(new) or followed

    @property
    def memory(self) -> int:
        """Bytes that its segments take while the run is open, about; catalogues have a limit of their own."""
        return sum(segment.memory for segment in list(self._segments.values()))

    def _covers(self, key: SegmentKey) -> bool:
        return key.path in self._generations.sources

    def _spend(self, size: int = 0) -> None:
        if self.budget is not None:
            self.budget.keep(size)

    def _take(self, size: int) -> bool:
        return self.budget is None or self.budget.take(size)

    def _release(self, size: int) -> None:
        if self.budget is not None:
            self.budget.release(size)

    @property
    def manifest(self) -> Manifest | None:
        """The manifest that is followed."""
        return self._generations.manifest

    @property
    def segments(self) -> list[SegmentKey]:
        """Segments that are read as they are, for no manifest covers them."""
        return sorted(self._segments)

    def consistently(self, work: Callable[[], Result]) -> Result:
        """Do something that reads; once more where a part of a compaction was lost meanwhile.

        Raises:
            StoreError: the store cannot be read.
        """
        while True:
            try:
                return work()
            except CompactedSegmentLostError as error:
                self.follow(error)

    def follow(self, error: CompactedSegmentLostError) -> None:
        """After a part of a compaction was lost: follow a newer generation, or the originals; where they are gone, go on without the object."""
        before = self.manifest and self.manifest.generation
        self.refresh()
        if (self.manifest and self.manifest.generation) != before:
            return
        listed = {key.path for key in self._listed()}
        if generation_of(error.key) and self._generations.sources <= listed:
            self._generations.distrust()
            self.refresh()
        else:
            self.damaged[error.key] = error.what
            self._forget()

    def _listed(self) -> dict[SegmentKey, int]:
        sizes = {}
        for entry in self._store.entries(SEGMENTS):
            try:
                sizes[SegmentKey.parse(entry.key)] = entry.size
            except FormatError as error:
                self.damaged[entry.key] = error.what
        return sizes

    def _opened(self, key: SegmentKey, size: int) -> ParquetObject | None:
        try:
            opened = open_object(self._store, key.path, size, self._catalogues)
            with whole(key.path):
                check_steps(np.array([opened.first, opened.last] if opened.rows else []), key.first, key.last)
        except NotFoundError:
            return None
        except FormatError as error:
            self.damaged[key.path] = error.what
            return None
        return opened

    def objects(self, attempt: str | None = None) -> list[Located]:
        """The objects with rows of one attempt; of the default view where it is left out."""
        if attempt is not None:
            compacted = self._generations.attempts.get(attempt)
            stored_objects: list[ParquetObject | CompactedObject] = [*compacted.objects] if compacted else []
            stored_objects += [
                self._segments[key] for key in sorted(self._segments) if key.writer.attempt == attempt
            ]
            return [
                Located(attempt, stored)
                for stored in stored_objects
                if stored.rows and stored.key not in self.damaged
            ]
        if self._view is None:
            self._view = self._newest()
        return [located for located in self._view if located.object.key not in self.damaged]

    def _newest(self) -> list[Located]:
        """Objects of all attempts; an attempt that starts at step s replaces every earlier row from s on."""
        view: list[Located] = []
        cut = NO_CUT
        for attempt in reversed(self.attempts()):
            located = self.objects(attempt)
            view.extend(
                Located(attempt, located_object.object, cut)
                for located_object in located
                if located_object.object.first < cut
            )
            cut = min([cut, *(located_object.object.first for located_object in located)])
        return view

    def attempts(self) -> list[str]:
        """Attempts that have written something, in the order of their first records."""
        names = {key.writer.attempt for key, segment in self._segments.items() if segment.rows}
        names |= self._generations.attempts.keys()
        if len(names) == 1:
            return list(names)
        return sorted(names, key=lambda name: (self.start_of(name), name))

    def start_of(self, attempt: str) -> int:
        """When an attempt wrote its first record; a writer's earliest is in its first segment."""
        if attempt in self._generations.attempts:
            return self._generations.attempts[attempt].started_ns
        if attempt not in self._started:
            earliest: dict[object, SegmentKey] = {}
            for key, segment in self._segments.items():
                if key.writer.attempt == attempt and segment.rows:
                    earliest[key.writer] = min(key, earliest.get(key.writer, key))
            times = [self._read(self._segments[key], ("time_ns",)) for key in earliest.values()]
            starts = [int(np.min(table["time_ns"].to_numpy())) for table in times if table is not None]
            self._started[attempt] = min(starts, default=0)
        return self._started[attempt]

    def tensors(self) -> list[TensorInfo]:
        """All tensors, in the order in which they were met, as the newest segment describes them."""
        if self._tensors is None:
            infos: dict[str, TensorInfo] = {}
            seen: set[int] = set()
            for attempt in self.attempts():
                for located in self.objects(attempt):
                    if id(located.object.catalogue) not in seen:
                        infos.update({info.name: info for info in located.object.catalogue})
                        seen = {id(located.object.catalogue)}
            self._tensors = list(infos.values())
        return self._tensors

    def reach(self) -> tuple[int, int]:
        """The first and last step of the default view; (0, -1) where there is none."""
        every_object = self.objects()
        first = min((located.object.first for located in every_object), default=0)
        return first, max((min(located.object.last, located.cut - 1) for located in every_object), default=-1)

    def probes(self) -> list[str]:
        """Names of probes that some object holds, sorted."""
        names = {name for located in self.objects() for name in located.object.columns}
        return sorted(name.removeprefix(PROBE) for name in names if name.startswith(PROBE))

    def scan(self, want: Want) -> Iterator[Columns]:
        """Columns of the default view, object by object, in no order of rows. Damaged objects are left out.

        Raises:
            StoreError: the store cannot be read.
            OverBudgetError: it takes more than `budget`.
        """
        scan = Scan(tuple(dict.fromkeys((*IDENTITY, *want.columns))), want, self.tensors())

        def read(located: Located) -> tuple[Columns, int] | None:
            columns = self._columns(located, scan)
            if columns is None:
                return None
            size = sum(column.nbytes for column in columns.values())
            return (columns, size) if self._take(size) else None

        for result in prefetch(read, self._due(want), self._readers):
            self._spend()
            if result is not None:
                columns, size = result
                yield columns
                self._release(size)

    def collect(self, want: Want) -> Columns:
        """What `scan` gives, in one."""
        parts = []
        for part in self.scan(want):
            self._spend(sum(column.nbytes for column in part.values()))
            parts.append(part)
        return joined(parts, dict.fromkeys((*IDENTITY, *want.columns)))

    def blocks(self, attempt: str | None, want: Want) -> list[Block]:
        """Whole rows: of one attempt, or of the default view where it is None."""
        blocks = []
        for block, size in self._each_block(attempt, want):
            self._spend(size)  # as much again stays, beside what is released
            blocks.append(block)
        return blocks

    def each_block(self, want: Want) -> Iterator[Block]:
        """Whole rows of the default view, object by object, in no order of rows. Damaged objects are left out.

        Raises:
            StoreError: the store cannot be read.
            OverBudgetError: it takes more than `budget`.
        """
        for block, _ in self._each_block(None, want):
            yield block

    def _each_block(self, attempt: str | None, want: Want) -> Iterator[tuple[Block, int]]:
        """Blocks, and the bytes of their rows."""

        def read(located: Located) -> tuple[Block, int] | None:
            stored = located.object
            if want.tensors is not None and not any(info.name in want.tensors for info in stored.catalogue):
                return None
            try:
                with self._decoding(stored, stored.columns) as table:
                    rows = None if table is None else _rows_of(table, located, want)
                    if rows is None:
                        return None
                    size = _COPIES * rows.nbytes
                    return (to_block(rows, stored.catalogue, stored.key), size) if self._take(size) else None
            except FormatError as error:
                self.damaged[stored.key] = error.what
                return None

        for result in prefetch(read, self._due(want, attempt), self._readers):
            self._spend()
            if result is not None:
                yield result
                self._release(result[1])

    def rows(self, attempt: str) -> Block:
        """All rows of one attempt, by step, worker, mode and tensor."""
        return concatenate(self.blocks(attempt, Want(()))).ordered()

    def rows_by_tensor(self, located: Located) -> dict[str, int]:
        """How many rows of each tensor an object holds."""
        table = self._read(located.object, ("tensor", "step"))
        if table is None:
            return {}
        counted = table["tensor"].value_counts().to_pylist()
        return {entry["values"]: entry["counts"] for entry in counted}

    def rows_by_step(self, attempt: str, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Steps of the objects of an attempt that reach to ``last``, ascending, and rows of each in all objects."""
        steps = [np.empty(0, np.int64)]
        first = max(
            (
                located_object.object.first
                for located_object in self.objects(attempt)
                if located_object.object.last == last
            ),
            default=0,
        )
        for located in self.objects(attempt):
            if located.object.last >= first:
                table = self._read(located.object, ("step",))
                held = np.empty(0, np.int64) if table is None else table["step"].to_numpy()
                steps.append(held[held >= first])
        return np.unique(np.concatenate(steps), return_counts=True)

    def _due(self, want: Want, attempt: str | None = None) -> list[Located]:
        due = []
        for located in self.objects(attempt):
            stored = located.object
            if stored.first > want.last or stored.last < want.first:
                continue
            recent = self._recent(located, want)
            if recent is None:
                due.append(located)
            elif recent not in due:
                due.append(recent)
        return due

    def _recent(self, located: Located, want: Want) -> Located | None:
        """The object with an attempt's last steps, in the place of a part, where all that is wanted is in it."""
        compacted = self._generations.attempts.get(located.attempt)
        if not isinstance(located.object, CompactedObject) or compacted is None or compacted.recent is None:
            return None
        if want.first < compacted.recent.first or compacted.recent.key in self.damaged:
            return None
        return Located(located.attempt, compacted.recent, located.cut)

    def _columns(self, located: Located, scan: Scan) -> Columns | None:
        stored = located.object
        places = scan.places(stored.catalogue)
        if not scan.is_wanted(places):
            return None
        unread = {*stored.constant, "tensor"} if isinstance(stored, CompactedObject) else {*stored.constant}
        with self._decoding(stored, stored.columns & set(scan.names) - unread) as table:
            if table is None:
                return None
            try:
                with whole(stored.key):
                    columns = from_table(table, places)
                    columns |= constants(stored.constant, scan.names, table.num_rows)
                    check_columns(columns)
                    check_steps(columns["step"], stored.first, stored.last)
            except FormatError as error:
                self.damaged[stored.key] = error.what
                return None
            if isinstance(stored, CompactedObject):
                columns["tensor"] = np.fromiter(places.values(), np.int32)[stored.places()]
            # Only probes can be lacking: the rest was checked with the footer.
            lacking = {name: np.full(table.num_rows, np.nan) for name in scan.names if name not in columns}
            return scan.chosen({**columns, **lacking}, located)

    def _read(self, stored: ParquetObject | CompactedObject, columns: Collection[str]) -> pa.Table | None:
        with self._decoding(stored, columns) as table:
            return table

    @contextmanager
    def _decoding(
        self, stored: ParquetObject | CompactedObject, columns: Collection[str]
    ) -> Iterator[pa.Table | None]:
        """An object's columns, with room in the process's memory until the wanted rows are taken; None where it is damaged."""
        try:
            size = stored.decoded_bytes(columns)
            decode = stored.fetch(columns)  # before room is taken: a store that hangs takes none
        except NotFoundError as error:  # deleted, for a compaction has its rows
            raise CompactedSegmentLostError(stored.key, error.what) from error
        with PROCESS.reserve(size, self.budget):
            try:
                table = decode()
            except FormatError as error:
                self.damaged[stored.key] = error.what
                table = None
            yield table


def _rows_of(table: pa.Table, located: Located, want: Want) -> pa.Table:
    """The wanted rows of an object's table."""
    import pyarrow as pa

    stored = located.object
    chosen = np.ones(table.num_rows, np.bool_)
    if max(want.first, stored.first) > stored.first or min(want.last, located.cut - 1) < stored.last:
        step = table["step"].to_numpy()
        chosen &= (step >= want.first) & (step <= want.last) & (step < located.cut)
    if want.tensors is not None:
        chosen &= is_one_of(table["tensor"], want.tensors)
    return table if chosen.all() else table.take(pa.array(np.flatnonzero(chosen)))
