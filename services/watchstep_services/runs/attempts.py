"""Attempts as the service knows them: from their document on the store, or from an operator's registration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import FormatError, NotFoundError
from watchstep.format import documents, layout
from watchstep.format.documents import AttemptDocument, EndDocument
from watchstep.store.store import Store
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Attempt, RunRow
from watchstep_services.runs.claim import Claim, lock_run

MOST_RANKS = 16_384
"""Workers of an attempt that the service follows; ranks are below it. What is kept of them stands in the attempt's row, and a segment
with rows of another rank counts as damaged."""

LONGEST_REASON = 2000
_LATER_REASON = 200
_WHOLE_REASONS = 64
"""Reasons of so many ends of an attempt are kept whole; what the others say is mostly the same."""


def read_document(run_store: Store, attempt: str) -> AttemptDocument | None:
    """An attempt's document; None where it is not there or is damaged."""
    key = layout.attempt_document(attempt)
    try:
        data = run_store.get(key, limit=documents.MAX_BYTES)
        return documents.decode(AttemptDocument, data, key)
    except (NotFoundError, FormatError):
        return None


def ensure(session: Session, run_id: int, attempt: str) -> Attempt:
    """The row of an attempt. One that was not known becomes the run's newest."""
    row = session.execute(select(Attempt).filter_by(run_id=run_id, attempt=attempt)).scalar_one_or_none()
    if row is None:
        row = Attempt(
            run_id=run_id, attempt=attempt, world_size=0, on_stop="ignore", started_ns=0, first_seen_ns=0,
            watermark=-1, largest=-1, writers={}, ends={}, context=[],
        )  # fmt: skip
        session.add(row)
        session.get_one(RunRow, run_id).attempt = attempt
        session.flush()
    return row


def describe(row: Attempt, document: AttemptDocument, now_ns: int) -> None:
    """Take over what an attempt's document says.

    It began by now, whatever its own clock says: by one that is ahead it would stay the newest for as long as that is.
    """
    row.world_size = max(1, int(document.world_size))
    row.on_stop = str(document.on_stop)
    row.started_ns = min(int(document.started_ns), now_ns)


def found(session: Session, run: RunRow, document: AttemptDocument) -> None:
    """Take over an attempt's document that lies on the store.

    What a process that is long gone left on its disk may be uploaded while a later attempt goes on: that one stays the
    run's newest.
    """
    before = session.execute(
        select(Attempt).filter_by(run_id=run.id, attempt=run.attempt)
    ).scalar_one_or_none()
    row = ensure(session, run.id, document.attempt)
    describe(row, document, read_clock(session))
    if before is not None and before.started_ns > row.started_ns:
        run.attempt = before.attempt


def load(
    database: Database, run_store: Store, run_id: int, attempt: str, claim: Claim | None = None
) -> Attempt:
    """The row of an attempt that has segments, made where there is none, with its document's content.

    Args:
        database: the database.
        run_store: the run's.
        run_id: of the run.
        attempt: its name.
        claim: the claim of the evaluation that asks; None where somebody else does.

    Raises:
        FencedError: another worker has taken the run.
        StoreError: the store did not answer.
    """
    row = described(database, run_id, attempt)
    if row is not None:
        return row
    return _take_over(database, (run_id, claim), attempt, read_document(run_store, attempt))


def described(database: Database, run_id: int, attempt: str) -> Attempt | None:
    """The row of an attempt whose document was read before; None of any other."""
    with database.read() as session:
        row = session.execute(select(Attempt).filter_by(run_id=run_id, attempt=attempt)).scalar_one_or_none()
    return row if row is not None and row.world_size else None


def undescribed(database: Database, run_id: int, attempt: str) -> Attempt:
    """The row of an attempt whose document cannot be read now, made where there is none; it has no workers yet."""
    return _take_over(database, (run_id, None), attempt, None)


def _take_over(
    database: Database, of: tuple[int, Claim | None], attempt: str, document: AttemptDocument | None
) -> Attempt:
    run_id, claim = of
    with database.write() as session:
        run = lock_run(session, run_id, claim)
        if document is not None:
            found(session, run, document)
            return ensure(session, run_id, attempt)
        newest = run.attempt
        row = ensure(session, run_id, attempt)
        # Nobody knows when one without a document began: it takes no other's place.
        run.attempt = newest or attempt
        return row


def note_ends(row: Attempt, ends: Sequence[EndDocument], found_ns: int) -> None:
    """Add how workers of an attempt ended; the row's ends are written once.

    Args:
        row: the attempt's.
        ends: documents of ranks below `MOST_RANKS`.
        found_ns: when they were found, by the database's clock.
    """
    kept = dict(row.ends)
    for end in ends:
        longest = LONGEST_REASON if len(kept) < _WHOLE_REASONS else _LATER_REASON
        kept[str(end.worker)] = _end_as_data(end, found_ns, longest)
    row.ends = kept


def _end_as_data(end: EndDocument, found_ns: int, longest: int) -> dict[str, Any]:
    """What is kept of the document that says how a worker ended."""
    return {
        "state": str(end.state),
        "last_step": int(end.last_step),
        "segments": int(end.segments),
        "writer": str(end.writer),
        "reason": str(end.reason)[:longest],
        "ended_ns": int(end.ended_ns),
        "found_ns": found_ns,
    }
