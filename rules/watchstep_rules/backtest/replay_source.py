"""Where a replay's rows come from: segments in the journal's order, or, where there is none, rows by their steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from watchstep.errors import FormatError, NotFoundError
from watchstep.format import segment
from watchstep.format.block import Block, concatenate
from watchstep.format.journal import JournalEvaluation, JournalSegment
from watchstep.format.layout import JOURNALS, SEGMENTS, SegmentKey
from watchstep.reading.index import prefetch, readers_of
from watchstep.reading.run import Run
from watchstep.reading.run_documents import count_parts, read_journal
from watchstep.store.store import Store
from watchstep_rules.backtest.replay import Arrival
from watchstep_rules.backtest.steps_read import StepReader
from watchstep_rules.engine.history import canonical

NO_JOURNAL = "no service has left a journal; all workers are taken to have been in time"


class OrderLostError(Exception):
    """The order in which rows were judged is not known any more.

    Args:
        what: why, in a few words.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


@dataclass(frozen=True)
class Recorded:
    """An attempt on a store.

    Attributes:
        run: the run.
        store: seen from the run.
        attempt: its name.
    """

    run: Run
    store: Store
    attempt: str


@dataclass(frozen=True)
class _Rest:
    """Rows from a first step on; of each rank those after a step."""

    first: int
    after: dict[int, int]


_ALL = _Rest(0, {})


def recorded_attempts(run: Run, store: Store) -> list[Recorded]:
    """Attempts with rows, oldest first; then those that a service only waited for."""
    written = run.attempts
    waited_for = sorted(set(store.folders(JOURNALS)) - set(written))
    return [Recorded(run, store, attempt) for attempt in (*written, *waited_for)]


def arrivals_by_steps(recorded: Recorded, rest: _Rest = _ALL) -> Iterator[Arrival]:
    """Rows by their steps, all workers at once, each arrival sealed at once; the clock is that of the newest row.

    Args:
        recorded: the attempt.
        rest: only these rows.
    """
    clock_ns = 0
    for block, last in StepReader(recorded.run.index, recorded.attempt).chunks(rest.first):
        rows = block.where(_is_after(block, rest.after)) if rest.after else block
        if len(rows):
            clock_ns = max(clock_ns, int(rows.time_ns.max()))
            yield Arrival(clock_ns, last, (canonical(rows),))


def _is_after(block: Block, after: dict[int, int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    chosen = np.ones(len(block), np.bool_)
    for rank, step in after.items():
        chosen &= (block.worker != rank) | (block.step > step)
    return chosen


def arrivals_of_journal(recorded: Recorded, notes: list[str]) -> Iterator[Arrival]:
    """What each evaluation was given, in the journal's order; rows that no service judged come last.

    Args:
        recorded: the attempt.
        notes: what stands against this being all that was judged is added.

    Raises:
        OrderLostError: there is no journal, it is damaged, or rows are not to be told apart any more.
        StoreError: the store cannot be read.
    """
    if not count_parts(recorded.store, recorded.attempt):
        raise OrderLostError(NO_JOURNAL)
    fetcher = _Fetcher(recorded)
    arrival = Arrival(0, -1)
    try:
        for arrival in _replayed(recorded, fetcher):
            yield arrival
    except FormatError as error:
        raise OrderLostError(f"{error.what}; rows are taken by their steps") from error
    later_rows = 0
    for later in arrivals_by_steps(recorded, fetcher.rest()):
        later_rows += sum(len(block) for block in later.blocks)
        sealed = max(arrival.sealed, later.sealed)
        yield Arrival(max(arrival.clock_ns, later.clock_ns), sealed, later.blocks)
    if later_rows:
        notes.append(
            f"{later_rows} rows after the journal's end, not judged by the service, are taken by their steps"
        )


def _replayed(recorded: Recorded, fetcher: _Fetcher) -> Iterator[Arrival]:
    """Segments are fetched a few ahead, across evaluations."""

    def items() -> Iterator[JournalEvaluation | JournalSegment]:
        for evaluation in read_journal(recorded.store, recorded.attempt):
            yield from evaluation.segments
            yield evaluation

    def work(item: JournalEvaluation | JournalSegment) -> JournalEvaluation | JournalSegment | Block:
        return item if isinstance(item, JournalEvaluation) else fetcher.fetched(item)

    blocks: list[Block] = []
    for item in prefetch(work, items(), readers_of(recorded.store)):
        if isinstance(item, JournalEvaluation):
            yield Arrival(item.at_ns, item.watermark, tuple(blocks), item.ended)
            blocks = []
            continue
        block = fetcher.found_again(item) if isinstance(item, JournalSegment) else item
        fetcher.note(block)
        blocks.append(block)


class _Fetcher:
    """Segments as they were judged: their own objects, or their rows in what a compaction made of them."""

    def __init__(self, recorded: Recorded) -> None:
        self._store = recorded.store
        self._there = {entry.key for entry in recorded.store.entries(f"{SEGMENTS}{recorded.attempt}/")}
        self._unread = set(self._there)
        self._reader = StepReader(recorded.run.index, recorded.attempt)
        self._reached: dict[int, int] = {}

    def note(self, block: Block) -> None:
        """Rows that have been judged."""
        for rank in map(int, np.unique(block.worker)):
            last = int(block.step[block.worker == rank].max())
            self._reached[rank] = max(self._reached.get(rank, -1), last)

    def rest(self) -> _Rest:
        """Rows that no evaluation was given: of each rank those after its last step that was judged."""
        starts = [min(self._reached.values(), default=-1) + 1]
        for path in self._unread:
            with suppress(FormatError):  # another's object below stats/, which no reader reads
                starts.append(SegmentKey.parse(path).first)
        return _Rest(min(starts), self._reached)

    def fetched(self, held: JournalSegment) -> Block | JournalSegment:
        """A segment's rows; the segment where its object is gone."""
        path = held.key.path
        self._unread.discard(path)
        if path not in self._there:
            return held
        try:
            return canonical(segment.decode(self._store.get(path, limit=segment.MAX_BYTES), path))
        except NotFoundError:
            return held

    def found_again(self, held: JournalSegment) -> Block:
        """The rows of a segment that is gone, by their ranks and steps."""
        if held.ranks is None:
            raise OrderLostError(f"segment {held.key.path} is gone; rows are taken by their steps")
        parts = []
        for rank in held.ranks:
            rows = self._reader.rows_of(rank.rank, rank.first, rank.last)
            if len(rows) != rank.rows:
                raise OrderLostError(
                    f"segment {held.key.path} is gone, and {len(rows)} of its {rank.rows} rows of rank "
                    f"{rank.rank} are found; rows are taken by their steps"
                )
            parts.append(rows)
        return canonical(concatenate(parts))
