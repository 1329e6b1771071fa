"""Attempts in the database: from their document on the store, or from an operator's registration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import FormatError, NotFoundError
from watchstep.format import documents, layout
from watchstep.format.documents import AttemptDocument, EndDocument
from watchstep.reading.run_documents import get_document
from watchstep.store.store import Store
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Attempt, RunRow
from watchstep_services.runs.claim import Claim, lock_run

MOST_RANKS = 16_384
"""Limit of workers of an attempt; ranks are below it. Their data is part of the attempt's row. A segment with rows of another rank
counts as damaged."""

LONGEST_REASON = 2000
_LATER_REASON = 200
_WHOLE_REASONS = 64
"""Ends of an attempt with full-length reasons; later ones mostly repeat them and are shortened."""


def read_document(run_store: Store, attempt: str) -> AttemptDocument | None:
    """An attempt's document; None if it is absent or damaged."""
    key = layout.attempt_document(attempt)
    try:
        data = get_document(run_store, key, documents.MAX_BYTES)
        return documents.decode(AttemptDocument, data, key)
    except (NotFoundError, FormatError):
        return None


def ensure(session: Session, run_id: int, attempt: str) -> Attempt:
    """Get or create the row of an attempt. A new one becomes the run's newest."""
    row = session.execute(select(Attempt).filter_by(run_id=run_id, attempt=attempt)).scalar_one_or_none()
    if row is None:
        row = Attempt(
            run_id=run_id, attempt=attempt, world_size=0, on_stop="ignore", started_ns=0, first_seen_ns=0,
            watermark=-1, largest=-1, ranks={}, ends={}, context=[],
        )  # fmt: skip
        session.add(row)
        session.get_one(RunRow, run_id).attempt = attempt
        session.flush()
    return row


def describe(row: Attempt, document: AttemptDocument, now_ns: int) -> None:
    """Copy the content of an attempt's document to its row.

    The start is at most the current time: an attempt with a clock ahead would otherwise remain the newest for that long.
    """
    row.world_size = max(1, int(document.world_size))
    row.on_stop = str(document.on_stop)
    row.started_ns = min(int(document.started_ns), now_ns)


def record_document(session: Session, run: RunRow, document: AttemptDocument) -> None:
    """Record an attempt's document from the store.

    The attempt becomes the run's newest if the run was listed after its newest attempt had been found: the document was written after that
    listing. Otherwise, and for a process that ended long ago, whose document is uploaded late, the later start counts, by the clocks of the attempts' machines.
    """
    before = session.execute(
        select(Attempt).filter_by(run_id=run.id, attempt=run.attempt)
    ).scalar_one_or_none()
    row = ensure(session, run.id, document.attempt)
    describe(row, document, read_clock(session))
    if before is None or before.started_ns <= row.started_ns:
        return
    # Only listings find ends; a request for a listing resets the time of the last one.
    was_listed = bool(before.ends) or run.listed_ns > before.first_seen_ns
    if document.late or not was_listed:
        run.attempt = before.attempt


def load(
    database: Database, run_store: Store, run_id: int, attempt: str, claim: Claim | None = None
) -> Attempt:
    """The row of an attempt with segments, created if absent, with the content of its document.

    Args:
        database: the database.
        run_store: the run's store.
        run_id: id of the run.
        attempt: name of the attempt.
        claim: the claim of the calling evaluation; None for other callers.

    Raises:
        FencedError: another worker has claimed the run.
        StoreError: the store did not answer.
    """
    row = described(database, run_id, attempt)
    if row is not None:
        return row
    return _record(database, (run_id, claim), attempt, read_document(run_store, attempt))


def described(database: Database, run_id: int, attempt: str) -> Attempt | None:
    """The row of an attempt if its document was read before; otherwise None."""
    with database.read() as session:
        row = session.execute(select(Attempt).filter_by(run_id=run_id, attempt=attempt)).scalar_one_or_none()
    return row if row is not None and row.world_size else None


def undescribed(database: Database, run_id: int, attempt: str) -> Attempt:
    """The row of an attempt with an unreadable document, created if absent; its world size is unknown."""
    return _record(database, (run_id, None), attempt, None)


def _record(
    database: Database, of: tuple[int, Claim | None], attempt: str, document: AttemptDocument | None
) -> Attempt:
    run_id, claim = of
    with database.write() as session:
        run = lock_run(session, run_id, claim)
        if document is not None:
            record_document(session, run, document)
            return ensure(session, run_id, attempt)
        newest = run.attempt
        row = ensure(session, run_id, attempt)
        # The start of an attempt without a document is unknown, so it does not become the newest.
        run.attempt = newest or attempt
        return row


def note_ends(row: Attempt, ends: Sequence[EndDocument], found_ns: int) -> None:
    """Add end documents to an attempt's row, which is written once.

    Args:
        row: the attempt's row.
        ends: documents of ranks below `MOST_RANKS`.
        found_ns: when they were found, by the database's clock.
    """
    by_rank = dict(row.ends)
    for end in ends:
        longest = LONGEST_REASON if len(by_rank) < _WHOLE_REASONS else _LATER_REASON
        by_rank[str(end.worker)] = _end_as_data(end, found_ns, longest)
    row.ends = by_rank


def _end_as_data(end: EndDocument, found_ns: int, longest: int) -> dict[str, Any]:
    """The stored fields of an end document."""
    return {
        "state": str(end.state),
        "last_step": int(end.last_step),
        "segments": int(end.segments),
        "writer": str(end.writer),
        "reason": str(end.reason)[:longest],
        "ended_ns": int(end.ended_ns),
        "found_ns": found_ns,
    }
