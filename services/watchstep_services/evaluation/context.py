"""Earlier rows of an attempt, read from the store by a process that does not have them in memory.

The rows of a journal position are read from its segment. Retention deletes segments after a compaction; the rows are then
read from the compacted run, by the ranks and steps that the database recorded when the segment was evaluated. Both give the
same rows in the same order.

A segment with rows in neither place is left out, and the caller reports it. This is the one exception to split
invariance: see docs/decisions/080-lost-context-is-reported.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import select

from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.format.block import Block, concatenate
from watchstep.format.layout import SegmentKey
from watchstep.reading.budget import OverBudgetError, ReadBudget
from watchstep.reading.compacted import COMPACTED
from watchstep.reading.index import RunIndex
from watchstep.store.store import Store
from watchstep_rules.backtest.replay import StepReader
from watchstep_rules.engine.rule_inputs import LOOKBACK_BINS, History, Lookback, canonical, joined, trimmed
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Attempt, Segment
from watchstep_services.evaluation.collect import RunSource, decode, fetch
from watchstep_services.runs.discovery import key_of
from watchstep_services.service.judging import LostContext

_MOST_ROWS = 500_000
"""Rows in memory after which rows outside the lookback are dropped."""

_SECONDS, _MEGABYTES = 60, 1024
"""Limits of reading from a compacted run, of the time in all and of the memory of a range of steps. A range is a quarter of that, unless a
hostile writer chose its rows."""


@dataclass(frozen=True)
class _JudgedSegment:
    """A segment that was evaluated before: journal position, key, and (rank, first step, last step, rows) of each rank."""

    position: int
    key: SegmentKey
    ranks: Sequence[Sequence[int]] | None


def read_context(
    database: Database, source: RunSource, attempt: Attempt, depth: Lookback
) -> tuple[History, LostContext | None]:
    """Read the rows of an attempt within the lookback of the next evaluation.

    Args:
        database: the database.
        source: the run's store and guard.
        attempt: row of the attempt; ``context`` lists the journal positions of the rows.
        depth: lookback of the rules.

    Returns:
        The rows, and the segments that could not be read.

    Raises:
        StoreError: the store did not answer, or contains nothing of the run.
    """
    run_store = source.store
    compacted = _CompactedRun(run_store, attempt.attempt)
    history, parts = History.empty(), list[tuple[int, Block]]()
    lost: list[tuple[_JudgedSegment, str]] = []
    for segment in _segments(database, attempt):
        try:
            source.guard.check(segment.key)
            parts.append((segment.position, _rows_of(run_store, segment, depth, compacted)))
            rows = sum(len(block) for _, block in parts)
            bins = sum(block.statistics.histogram.size for _, block in parts)
            # Only a few rows of each segment may be needed.
            if rows > _MOST_ROWS or bins > LOOKBACK_BINS * _MOST_ROWS:
                history, parts = trimmed(joined(parts, history), depth, attempt.watermark), []
        except (FormatError, NotFoundError) as error:
            lost.append((segment, error.what))
    history = trimmed(joined(parts, history), depth, attempt.watermark)
    if not lost:
        return history, None
    if _is_empty(run_store):
        # An unmounted folder is more likely than a run with all objects deleted, so the evaluation is retried.
        raise StoreError(
            f"store {run_store.location}: has no object of the run", "check that it is mounted and readable"
        )
    return history, LostContext(len(lost), max(segment.key.last for segment, _ in lost), lost[-1][1])


def _segments(database: Database, attempt: Attempt) -> list[_JudgedSegment]:
    with database.read() as session:
        rows: Iterable[Segment] = session.execute(
            select(Segment)
            .where(Segment.run_id == attempt.run_id, Segment.position.in_(attempt.context))
            .order_by(Segment.position)
        ).scalars()
        return [
            _JudgedSegment(row.position, key_of(row), row.ranks) for row in rows if row.position is not None
        ]


def _is_empty(run_store: Store) -> bool:
    return next(iter(run_store.entries("")), None) is None


def _rows_of(run_store: Store, segment: _JudgedSegment, depth: Lookback, compacted: _CompactedRun) -> Block:
    """Read a segment's rows.

    Raises:
        FormatError, NotFoundError: they can be read neither from the segment nor from the compacted run.
        StoreError: the store did not answer.
    """
    try:
        return _read_original(run_store, segment.key, histograms=depth.histograms)
    except (FormatError, NotFoundError) as error:
        block = compacted.rows_of(segment)
        if block is None:
            raise
        del error
        return block if depth.histograms else block.without_histograms()


def _read_original(run_store: Store, key: SegmentKey, *, histograms: bool) -> Block:
    """Read the rows from a segment's own object.

    Damage in its histograms was not noticed if no rule used them. A rule that does now reports that histograms were
    not read, and the other rules are evaluated.
    """
    data = fetch(run_store, key)
    try:
        return decode(data, key, histograms=histograms)
    except FormatError:
        return decode(data, key, histograms=False)


class _CompactedRun:
    """The compacted objects of a run; opened when the first segment is missing."""

    def __init__(self, run_store: Store, attempt: str) -> None:
        self._store, self._attempt = run_store, attempt
        self._opened: tuple[RunIndex, StepReader | None] | None = None

    def rows_of(self, segment: _JudgedSegment) -> Block | None:
        """The rows of a segment; None if they are not in the compacted run, cannot be distinguished from others, or take too much to read.

        Raises:
            StoreError: the store did not answer.
        """
        if segment.ranks is None:
            return None
        index, reader = self._open()
        if reader is None or index.manifest is None or segment.key.path not in index.manifest.sources:
            return None
        parts = []
        for rank, first, last, rows in segment.ranks:
            try:
                part = reader.rows_of(rank, first, last)
            except OverBudgetError:
                return None
            # A rank's step is never split, so these rows are exactly the segment's.
            if len(part) != rows:
                return None
            parts.append(part)
        return canonical(concatenate(parts))

    def _open(self) -> tuple[RunIndex, StepReader | None]:
        if self._opened is None:
            budget = ReadBudget(_SECONDS, _MEGABYTES)
            index = RunIndex(self._store, budget).judged()
            reader = None
            # A refresh opens every segment that no manifest covers, so it is done only if there is a manifest.
            if any(entry.key.endswith("/manifest.json") for entry in self._store.entries(COMPACTED)):
                with suppress(OverBudgetError):
                    index.refresh()
                    reader = StepReader(
                        index, self._attempt, lambda: ReadBudget(budget.remaining_seconds, _MEGABYTES)
                    )
            self._opened = (index, reader)
        return self._opened
