"""The index of a run: which object contains which statistics, and reading their columns with prefetching."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.block import Block, concatenate
from watchstep.format.layout import FLIGHTS, SEGMENTS, FlightKey, SegmentKey
from watchstep.format.parquet.table import histograms_of, to_block
from watchstep.format.segment_checks import HISTOGRAM_COLUMNS, PROBE, check_columns, check_steps, whole
from watchstep.format.statistics import Histograms
from watchstep.format.tensors import TensorInfo
from watchstep.platform.arrow import require_arrow
from watchstep.reading.arrow_object import ArrowObject, open_segment
from watchstep.reading.budget import PROCESS, ReadBudget
from watchstep.reading.columns import (
    IDENTITY,
    NO_CUT,
    Columns,
    Located,
    Scan,
    Selection,
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
from watchstep.reading.parquet_object import Catalogues
from watchstep.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa


_BUCKET_READERS = 16
"""Number of parallel requests to a bucket, which mostly wait for answers."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def readers_of(store: Store) -> int:
    """Return the number of objects read in parallel. For a folder, more threads than cores only contend for the GIL."""
    return min(_BUCKET_READERS, max(2, os.cpu_count() or 1)) if store.is_local else _BUCKET_READERS


def prefetch(work: Callable[[Item], Result], items: Iterable[Item], readers: int) -> Iterator[Result]:
    """Yield results in order. At most twice ``readers`` items are in progress or waiting, so that memory is bounded."""
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


_MOST_LOST = 32
"""How often a query follows what happened to a compaction. Missing objects are found together, damaged ones and other generations one by one."""

_COPIES = 2
"""How often the rows of blocks are in memory: as a table and as a block; later as blocks and as the concatenated one."""


class RunIndex:
    """The objects of a run with statistics. Footers are cached, columns are not.

    Attributes:
        damaged: segments that could not be read, and why; the others are available.
        budget: budget of the current query; None for no limits.
        range_steps: the first step of all queries, and the step behind the last.
        before: only the attempts before this one; empty for all.
    """

    def __init__(
        self,
        store: Store,
        budget: ReadBudget | None = None,
        range_steps: tuple[int, int] = (0, NO_CUT),
    ) -> None:
        require_arrow("reading a recorded run")
        self._store = store
        self._readers = readers_of(store)
        self._segments: dict[SegmentKey, ArrowObject] = {}
        self._flights: dict[FlightKey, ArrowObject] = {}
        self._has_flights = True
        self._catalogues = Catalogues()
        self._generations = Generations(store, self._catalogues)
        self._started: dict[str, int] = {}
        self.damaged: dict[str, str] = {}
        self.budget = budget
        self.range_steps = range_steps
        self.before = ""
        self._forget()

    def _forget(self) -> None:
        self._grouped: tuple[dict[str, list[SegmentKey]], dict[str, list[FlightKey]]] | None = None
        self._view: list[Located] | None = None
        self._tensors: list[TensorInfo] | None = None

    def snapshot(self, budget: ReadBudget | None = None) -> RunIndex:
        """Return a copy of the index, for reading by another thread while this one is refreshed.

        Args:
            budget: the reader's budget.
        """
        self.tensors(), self.objects()  # computed now, and shared with the copy
        copied = copy(self)
        copied._generations = copy(self._generations)  # noqa: SLF001 - same class
        copied.budget = budget
        return copied

    def unrestricted(self) -> RunIndex:
        """Return the index with all steps, for one query."""
        copied = copy(self)
        copied.range_steps = (0, NO_CUT)
        return copied

    def judged(self) -> RunIndex:
        """Return the index with the rows that rules judge: without those of the steps before a failure."""
        copied = copy(self)
        copied._flights, copied._has_flights = {}, False  # noqa: SLF001 - same class
        copied._forget()  # noqa: SLF001 - as above
        return copied

    def earlier_than(self, attempt: str) -> RunIndex:
        """Return the index with the attempts before one; with all of them if it has no record yet."""
        copied = copy(self)
        copied.before = attempt
        copied._forget()  # noqa: SLF001 - same class
        return copied

    @property
    def is_restricted(self) -> bool:
        """Whether queries are restricted to a range of steps."""
        return self.range_steps != (0, NO_CUT)

    def is_within(self, step: int) -> bool:
        """Whether queries include a step."""
        return self.range_steps[0] <= step < self.range_steps[1]

    def _within(self, selection: Selection) -> Selection:
        """Return the part of a selection that is within the range of steps."""
        if not self.is_restricted:
            return selection
        first, end = self.range_steps
        return replace(selection, first=max(selection.first, first), last=min(selection.last, end - 1))

    def exclude(self, damaged: Mapping[str, str]) -> None:
        """Exclude segments that another reader has found damaged.

        Args:
            damaged: segment's path → reason.
        """
        new = {path: reason for path, reason in damaged.items() if path not in self.damaged}
        if new:
            self.damaged.update(new)
            self._segments = {key: segment for key, segment in self._segments.items() if key.path not in new}
            self._flights = {key: flight for key, flight in self._flights.items() if key.path not in new}
            self._forget()

    def refresh(self) -> bool:
        """Look for new segments and read their footers. Returns whether there were any.

        Raises:
            StoreError: the store cannot be read.
        """
        listed = self._listed()  # before the manifest, because a later manifest only covers more of them
        followed = self._generations.refresh(self.budget)
        self._segments = {key: segment for key, segment in self._segments.items() if not self._covers(key)}
        self._grouped = None
        segments = self._segments
        new = [
            key
            for key in listed
            if key not in segments and key.path not in self.damaged and not self._covers(key)
        ]
        opened = prefetch(lambda key: self._opened(key, listed[key]), new, self._readers)
        for key, stored in zip(new, opened, strict=True):
            if stored is not None:
                self._segments[key] = stored
            self._spend()
        if any(key not in self._segments and key.path not in self.damaged for key in new):
            return self.refresh() or True  # one was deleted after listing: a newer generation includes it
        found = self._refresh_flights()
        if new or followed or found:
            self._forget()
        return bool(new) or followed or found

    def _refresh_flights(self) -> bool:
        """Look for new objects with the steps before a failure. Returns whether there were any."""
        if not self._has_flights:
            return False
        new = {}
        for entry in self._store.entries(FLIGHTS):
            try:
                key = FlightKey.parse(entry.key)
            except FormatError as error:
                self.damaged[entry.key] = error.what
                continue
            if key not in self._flights and key.path not in self.damaged:
                new[key] = entry.size
        opened = prefetch(lambda key: self._opened(key, new[key]), new, self._readers)
        found = dict(self._flights)  # a snapshot of the index keeps the earlier ones
        for key, stored in zip(new, opened, strict=True):
            if stored is not None:
                found[key] = stored
            self._spend()
        is_more = len(found) > len(self._flights)
        self._flights = found
        return is_more

    @property
    def memory(self) -> int:
        """Approximate memory of its segments, manifest and catalogues in bytes."""
        stored = [*self._segments.values(), *self._flights.values()]
        return sum(segment.memory for segment in stored) + self._generations.memory + self._catalogues.memory

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
        """The manifest in use."""
        return self._generations.manifest

    @property
    def segments(self) -> list[SegmentKey]:
        """Segments that are read directly, because no manifest covers them."""
        return sorted(self._segments)

    def consistently(self, work: Callable[[], Result]) -> Result:
        """Run a function that reads; repeat it if a part of a compaction was lost meanwhile.

        Raises:
            OverBudgetError: `budget` is exceeded.
            StoreError: the store cannot be read, or more and more parts of compactions are lost: somebody writes manifests without them.
        """
        for _ in range(_MOST_LOST):
            try:
                return work()
            except CompactedSegmentLostError as error:
                self._spend()
                self.follow(error)
        return work()

    def follow(self, error: CompactedSegmentLostError) -> None:
        """React to a lost part of a compaction: use a newer generation, or the originals; if they are gone, continue without the object."""
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
            self.damaged.update(dict.fromkeys(self._generations.missing(), "the object is missing"))
            self._forget()

    def _listed(self) -> dict[SegmentKey, int]:
        sizes = {}
        for entry in self._store.entries(SEGMENTS):
            try:
                sizes[SegmentKey.parse(entry.key)] = entry.size
            except FormatError as error:
                self.damaged[entry.key] = error.what
        return sizes

    def _opened(self, key: SegmentKey | FlightKey, size: int) -> ArrowObject | None:
        try:
            opened = open_segment(self._store, key.path, size, self._catalogues)
            with whole(key.path):
                check_steps(np.array([opened.first, opened.last] if opened.rows else []), key.first, key.last)
        except NotFoundError:
            return None
        except FormatError as error:
            self.damaged[key.path] = error.what
            return None
        return opened

    def objects(self, attempt: str | None = None) -> list[Located]:
        """Return the objects with rows of one attempt; by default those of the default view."""
        if attempt is not None:
            compacted = self._generations.attempts.get(attempt)
            stored_objects: list[ArrowObject | CompactedObject] = [*compacted.objects] if compacted else []
            segments, flights = self._by_attempt()
            stored_objects += [self._segments[key] for key in segments.get(attempt, ())]
            stored_objects += [self._flights[key] for key in flights.get(attempt, ())]
            return [
                Located(attempt, stored)
                for stored in stored_objects
                if stored.rows and stored.key not in self.damaged
            ]
        if self._view is None:
            self._view = self._newest()
        return [located for located in self._view if located.object.key not in self.damaged]

    def _by_attempt(self) -> tuple[dict[str, list[SegmentKey]], dict[str, list[FlightKey]]]:
        """Return the segments and flights of each attempt, in order. They are grouped once, because a run may have thousands of attempts."""
        if self._grouped is None:
            segments: dict[str, list[SegmentKey]] = {}
            for key in sorted(self._segments):
                segments.setdefault(key.writer.attempt, []).append(key)
            flights: dict[str, list[FlightKey]] = {}
            for flight in sorted(self._flights):
                flights.setdefault(flight.attempt, []).append(flight)
            self._grouped = segments, flights
        return self._grouped

    def _newest(self) -> list[Located]:
        """Return objects of all attempts; an attempt that starts at step s replaces every earlier row from s on."""
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
        """Return attempts with records, in the order of their first records."""
        names = {key.writer.attempt for key, segment in self._segments.items() if segment.rows}
        names |= self._generations.attempts.keys()
        if len(names) == 1 and self.before not in names:
            return list(names)
        ordered = sorted(names, key=lambda name: (self.start_of(name), name))
        return ordered[: ordered.index(self.before)] if self.before in names else ordered

    def first_steps(self) -> dict[str, int]:
        """Return the first step of each attempt with records, oldest attempt first."""
        located = ((attempt, self.objects(attempt)) for attempt in self.attempts())
        return {attempt: min(stored.object.first for stored in found) for attempt, found in located if found}

    def start_of(self, attempt: str) -> int:
        """Return the time of an attempt's first record; a writer's earliest is in its first segment."""
        if attempt in self._generations.attempts:
            return self._generations.attempts[attempt].started_ns
        if attempt not in self._started:
            earliest: dict[object, SegmentKey] = {}
            for key in self._by_attempt()[0].get(attempt, ()):
                if self._segments[key].rows:
                    earliest.setdefault(key.writer, key)
            times = [self._read(self._segments[key], ("time_ns",)) for key in earliest.values()]
            starts = [int(np.min(table["time_ns"].to_numpy())) for table in times if table is not None]
            self._started[attempt] = min(starts, default=0)
        return self._started[attempt]

    def tensors(self) -> list[TensorInfo]:
        """Return all tensors in the order of their first occurrence, as the newest segment describes them."""
        if self._tensors is None:
            infos: dict[str, TensorInfo] = {}
            for attempt in self.attempts():
                infos.update({info.name: info for info in self.tensors_of(attempt)})
            self._tensors = list(infos.values())
        return self._tensors

    def tensors_of(self, attempt: str) -> list[TensorInfo]:
        """Return the tensors of an attempt in the order of their first occurrence, as its newest segment describes them."""
        found: dict[str, TensorInfo] = {}
        previous: tuple[TensorInfo, ...] = ()
        for located in self.objects(attempt):
            if located.object.catalogue is not previous:
                previous = located.object.catalogue
                found.update({info.name: info for info in previous})
        # Compacted objects are in another order; their manifest has the original one.
        compacted = self._generations.attempts.get(attempt)
        names = [info.name for info in compacted.catalogue if info.name in found] if compacted else []
        return [found[name] for name in dict.fromkeys([*names, *found])]

    def step_range(self) -> tuple[int, int]:
        """Return the first and last step of the default view; (0, -1) if it is empty.

        In a restricted range, steps between the range's ends and the nearest records may be included.
        """
        ranges = [
            (
                max(located.object.first, self.range_steps[0]),
                min(located.object.last, located.cut - 1, self.range_steps[1] - 1),
            )
            for located in self.objects()
        ]
        ranges = [(first, last) for first, last in ranges if first <= last]
        return min((first for first, _ in ranges), default=0), max((last for _, last in ranges), default=-1)

    def stated_workers(self) -> list[int] | None:
        """Return the workers of the default view, ascending, if the objects' descriptions state them; None if rows must be read."""
        stated = [located.object.constant.get("worker") for located in self.objects()]
        workers = sorted({worker for worker in stated if worker is not None})
        return None if self.is_restricted or None in stated else workers

    def probes(self) -> list[str]:
        """Return the sorted names of recorded probes."""
        names = {name for located in self.objects() for name in located.object.columns}
        return sorted(name.removeprefix(PROBE) for name in names if name.startswith(PROBE))

    def scan(self, selection: Selection) -> Iterator[Columns]:
        """Yield columns of the default view, object by object, with rows in no particular order. Damaged objects are omitted.

        Raises:
            StoreError: the store cannot be read.
            OverBudgetError: `budget` is exceeded.
        """
        selection = self._within(selection)
        scan = Scan(tuple(dict.fromkeys((*IDENTITY, *selection.columns))), selection, self.tensors())

        def read(located: Located) -> tuple[Columns, int] | None:
            columns = self._columns(located, scan)
            if columns is None:
                return None
            size = sum(column.nbytes for column in columns.values())
            return (columns, size) if self._take(size) else None

        for result in prefetch(read, self._due(selection), self._readers):
            self._spend()
            if result is not None:
                columns, size = result
                yield columns
                self._release(size)

    def collect(self, selection: Selection) -> Columns:
        """Return the concatenated results of `scan`."""
        parts = []
        for part in self.scan(selection):
            self._spend(sum(column.nbytes for column in part.values()))
            parts.append(part)
        return joined(parts, dict.fromkeys((*IDENTITY, *selection.columns)))

    def blocks(self, attempt: str | None, selection: Selection) -> list[Block]:
        """Return whole rows: of one attempt, or of the default view if it is None."""
        blocks = []
        for block, size in self._each_block(attempt, selection):
            self._spend(size)  # the same amount stays, in addition to what is released
            blocks.append(block)
        return blocks

    def histograms(self, selection: Selection) -> Iterator[tuple[Columns, Histograms]]:
        """Yield columns of the default view with the histograms of their rows, object by object, in no particular order.

        Only the selected columns, those of identity and the histograms are read. Damaged objects are omitted.

        Raises:
            StoreError: the store cannot be read.
            OverBudgetError: `budget` is exceeded.
        """
        selection = self._within(selection)
        scan = Scan(tuple(dict.fromkeys((*IDENTITY, *selection.columns))), selection, self.tensors())

        def read(located: Located) -> tuple[Columns, Histograms, int] | None:
            stored = located.object
            places = scan.places(stored.catalogue)
            if not scan.is_selected(places):
                return None
            with self._decoding(stored, stored.columns & {*scan.names, *HISTOGRAM_COLUMNS}) as table:
                rows = None if table is None else _rows_of(table, located, selection)
                if rows is None:
                    return None
                try:
                    with whole(stored.key):
                        histograms = histograms_of(rows)
                        columns = from_table(rows.drop_columns(sorted(HISTOGRAM_COLUMNS)), places)
                        check_columns(columns)
                        check_steps(columns["step"], stored.first, stored.last)
                except FormatError as error:
                    self.damaged[stored.key] = error.what
                    return None
                size = _COPIES * rows.nbytes
                return (columns, histograms, size) if self._take(size) else None

        for result in prefetch(read, self._due(selection), self._readers):
            self._spend()
            if result is not None:
                columns, histograms, size = result
                yield columns, histograms
                self._release(size)

    def _each_block(self, attempt: str | None, selection: Selection) -> Iterator[tuple[Block, int]]:
        """Yield blocks, and the bytes of their rows."""
        selection = self._within(selection)

        def read(located: Located) -> tuple[Block, int] | None:
            stored = located.object
            if selection.tensors is not None and not any(
                info.name in selection.tensors for info in stored.catalogue
            ):
                return None
            try:
                with self._decoding(stored, stored.columns) as table:
                    rows = None if table is None else _rows_of(table, located, selection)
                    if rows is None:
                        return None
                    size = _COPIES * rows.nbytes
                    return (to_block(rows, stored.catalogue, stored.key), size) if self._take(size) else None
            except FormatError as error:
                self.damaged[stored.key] = error.what
                return None

        for result in prefetch(read, self._due(selection, attempt), self._readers):
            self._spend()
            if result is not None:
                yield result
                self._release(result[1])

    def rows(self, attempt: str) -> Block:
        """Return all rows of one attempt, by step, worker, mode and tensor."""
        return concatenate(self.blocks(attempt, Selection(()))).ordered()

    def rows_by_tensor(self, located: Located) -> dict[str, int]:
        """Return the number of rows of each tensor in an object."""
        table = self._read(located.object, ("tensor", "step"))
        if table is None:
            return {}
        counted = table["tensor"].value_counts().to_pylist()
        return {entry["values"]: entry["counts"] for entry in counted}

    def rows_by_step(
        self, attempt: str, first: int = 0, tensor: str | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the steps of an attempt from ``first`` on, ascending, and their numbers of rows, of all tensors or of one."""
        steps, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for located in self.objects(attempt):
            if located.object.last < first:
                continue
            table = self._read(located.object, ("step",) if tensor is None else ("step", "tensor"))
            if table is None:
                continue
            step = table["step"].to_numpy()
            chosen = (
                step >= first if tensor is None else (step >= first) & is_one_of(table["tensor"], {tensor})
            )
            in_object, numbers = np.unique(step[chosen], return_counts=True)
            self._spend(in_object.nbytes + numbers.nbytes)
            steps.append(in_object)
            counts.append(numbers)
        merged, places = np.unique(np.concatenate(steps), return_inverse=True)
        return merged, np.bincount(places, np.concatenate(counts), len(merged)).astype(np.int64)

    def _due(self, selection: Selection, attempt: str | None = None) -> list[Located]:
        due = []
        for located in self.objects(attempt):
            stored = located.object
            if stored.first > selection.last or stored.last < selection.first:
                continue
            recent = self._recent(located, selection)
            if recent is None:
                due.append(located)
            elif recent not in due:
                due.append(recent)
        return due

    def _recent(self, located: Located, selection: Selection) -> Located | None:
        """Return the object with an attempt's last steps as a replacement of a segment, if it contains all selected steps."""
        compacted = self._generations.attempts.get(located.attempt)
        if not isinstance(located.object, CompactedObject) or compacted is None or compacted.recent is None:
            return None
        if selection.first < compacted.recent.first or compacted.recent.key in self.damaged:
            return None
        return Located(located.attempt, compacted.recent, located.cut)

    def _columns(self, located: Located, scan: Scan) -> Columns | None:
        stored = located.object
        places = scan.places(stored.catalogue)
        if not scan.is_selected(places):
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
            # Only probes can be missing: the rest was checked with the footer.
            missing = {name: np.full(table.num_rows, np.nan) for name in scan.names if name not in columns}
            return scan.chosen({**columns, **missing}, located)

    def _read(self, stored: ArrowObject | CompactedObject, columns: Collection[str]) -> pa.Table | None:
        with self._decoding(stored, columns) as table:
            return table

    @contextmanager
    def _decoding(
        self, stored: ArrowObject | CompactedObject, columns: Collection[str]
    ) -> Iterator[pa.Table | None]:
        """Yield an object's columns, with memory reserved until the selected rows are extracted; None if it is damaged."""
        try:
            size = stored.decoded_bytes(columns)
            decode = stored.fetch(columns)  # before reserving memory, so that a hanging store blocks none
        except NotFoundError as error:  # deleted, because a compaction includes its rows
            raise CompactedSegmentLostError(stored.key, error.what) from error
        with PROCESS.reserve(size, self.budget, stored.key):
            try:
                table = decode()
            except FormatError as error:
                self.damaged[stored.key] = error.what
                table = None
            yield table


def _rows_of(table: pa.Table, located: Located, selection: Selection) -> pa.Table:
    """Return the selected rows of an object's table."""
    import pyarrow as pa

    stored = located.object
    chosen = np.ones(table.num_rows, np.bool_)
    if (
        max(selection.first, stored.first) > stored.first
        or min(selection.last, located.cut - 1) < stored.last
    ):
        step = table["step"].to_numpy()
        chosen &= (step >= selection.first) & (step <= selection.last) & (step < located.cut)
    if selection.tensors is not None:
        chosen &= is_one_of(table["tensor"], selection.tensors)
    rows = np.flatnonzero(chosen)
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return table.slice(int(rows[0]), len(rows))  # without a copy: the usual form of a compacted object
    return table.take(pa.array(rows))
