"""The journal on the store: the record of evaluations, written from the tables so that a backtest can replay it without them.

Parts consist of committed ticks only, and are created only if absent. So two processes that write the same part at once, or one
that dies between the object and the row that records it, leave one part, which is used unchanged. Ticks and watermarks
are deleted from the database once the journal has them; a run of weeks would otherwise have millions of rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from watchstep.errors import FormatError, StoreError
from watchstep.format import journal
from watchstep.format.journal import JournalEvaluation, JournalPart, JournalSegment, RankRows
from watchstep.format.layout import journal_part
from watchstep.reading.run_documents import read_part
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import nanoseconds
from watchstep_services.core.store_location import StorePlace
from watchstep_services.db.clock import now_ns
from watchstep_services.db.models import Attempt, RunRow, Segment, TickRow, WatermarkRow
from watchstep_services.runs.discovery import key_of
from watchstep_services.runs.lifecycle import ENDED
from watchstep_services.service.context import Service


def purge_written(session: Session, run_id: int) -> None:
    """Delete ticks and watermarks that no unwritten part of a run's journal needs.

    An unwritten part needs the last tick before it, of any attempt, because its segments begin there, and each attempt's
    last watermark.
    """
    unwritten = (
        select(func.min(Attempt.journaled))
        .where(Attempt.run_id == run_id, Attempt.ticks > Attempt.journaled)
        .scalar_subquery()
    )
    all_ticks = select(RunRow.ticks).where(RunRow.id == run_id).scalar_subquery()
    bound = session.execute(select(func.coalesce(unwritten, all_ticks, 0))).scalar_one() - 1
    session.execute(
        delete(TickRow)
        .where(TickRow.run_id == run_id, TickRow.tick < bound)
        .execution_options(synchronize_session=False)
    )
    later = aliased(WatermarkRow)
    followed = select(later.tick).where(
        later.run_id == run_id,
        later.attempt == WatermarkRow.attempt,
        later.tick > WatermarkRow.tick,
        later.tick < bound,
    )
    session.execute(
        delete(WatermarkRow)
        .where(WatermarkRow.run_id == run_id, WatermarkRow.tick < bound, followed.exists())
        .execution_options(synchronize_session=False)
    )


_OVER = (*ENDED, "lost")
_RETRY_SECONDS = 600.0


@dataclass(frozen=True)
class Unwritten:
    """An attempt with evaluations that are not on the store yet."""

    attempt_id: int
    run_id: int
    attempt: str
    project: str
    run: str
    place: StorePlace


def unwritten(service: Service) -> list[Unwritten]:
    """Attempts that have ended, or have enough evaluations for a part of the journal; those with the fewest parts first."""
    rows = (
        select(Attempt, RunRow)
        .join(RunRow, RunRow.id == Attempt.run_id)
        .order_by(Attempt.journal_parts, Attempt.id)
    )
    with service.database.read() as session:
        due_rows = session.execute(rows.where(_is_due())).all()
        return [
            Unwritten(attempt.id, run.id, attempt.attempt, run.project, run.run, run.place)
            for attempt, run in due_rows
        ]


def _is_due() -> ColumnElement[bool]:
    over = or_(RunRow.state.in_(_OVER), RunRow.attempt != Attempt.attempt)
    return and_(
        Attempt.ticks > Attempt.journaled,
        Attempt.journal_due_ns <= now_ns(),
        or_(over, Attempt.ticks - Attempt.journaled >= journal.MAX_EVALUATIONS),
    )


def write_journal(service: Service, due: Unwritten, until: float = math.inf) -> int:
    """Write the due parts of an attempt's journal; return their number.

    Args:
        service: the service.
        due: the attempt.
        until: time of the monotonic clock after which no further part is begun.

    Raises:
        StoreError: the store cannot be written; it is tried again after some time.
        FormatError: something else lies where a part should be; what is due now is left out.
    """
    written = 0
    while _write_part(service, due):
        written += 1
        if time.monotonic() >= until:
            break
    return written


def _write_part(service: Service, due: Unwritten) -> bool:
    with service.database.read() as session:
        row = session.get_one(Attempt, due.attempt_id)
        evaluations = journal.first_part(_evaluations(session, row))
    if not evaluations:
        return False
    journal_part = JournalPart(due.attempt, row.journal_parts, evaluations)
    try:
        failpoint("journal.writing", due)
        journal_part = _put(service, due, journal_part, row.ticks)
        failpoint("journal.on_store", due)
    except FormatError:
        _note(service, journal_part, due, row.journal_parts, row.ticks)
        raise
    except StoreError:
        _put_off(service, due)
        raise
    _note(service, journal_part, due, journal_part.number + 1, journal_part.evaluations[-1].tick + 1)
    failpoint("journal.noted", due)
    return True


def _put(service: Service, due: Unwritten, part: JournalPart, ticks: int) -> JournalPart:
    """Create a part; return the one on the store."""
    run_store = service.stores.of_run(due.place, due.run)
    key = journal_part(due.attempt, part.number)
    if run_store.create(key, journal.encode(part)):
        return part
    there = read_part(run_store, due.attempt, part.number)
    if there.evaluations[-1].tick >= ticks:
        raise FormatError(f"{key}: not written by this service", "remove it, if nobody needs it")
    return there


def _note(service: Service, journal_part: JournalPart, due: Unwritten, parts: int, journaled: int) -> None:
    with service.database.write() as session:
        session.execute(
            update(Attempt)
            .where(Attempt.id == due.attempt_id, Attempt.journal_parts == journal_part.number)
            .values(journal_parts=parts, journaled=journaled)
        )
        session.flush()
        purge_written(session, due.run_id)


def _put_off(service: Service, due: Unwritten) -> None:
    """Postpone the next try, so that a read-only store is not called at every sweep."""
    with service.database.write() as session:
        session.execute(
            update(Attempt)
            .where(Attempt.id == due.attempt_id)
            .values(journal_due_ns=now_ns() + nanoseconds(_RETRY_SECONDS))
            .execution_options(synchronize_session=False)
        )


def _evaluations(session: Session, attempt: Attempt) -> Iterator[JournalEvaluation]:
    """Evaluations that are not in the journal, in order."""
    of_run, of_attempt = TickRow.run_id == attempt.run_id, TickRow.attempt == attempt.attempt
    ticks = (
        session.execute(
            select(TickRow)
            .where(of_run, of_attempt, TickRow.tick >= attempt.journaled)
            .order_by(TickRow.tick)
            .limit(journal.MAX_EVALUATIONS)
        )
        .scalars()
        .all()
    )
    if not ticks:
        return
    first, last = ticks[0].tick, ticks[-1].tick
    watermarks = {
        row.tick: row.step
        for row in session.execute(
            select(WatermarkRow).where(
                WatermarkRow.run_id == attempt.run_id, WatermarkRow.tick.between(first, last)
            )
        ).scalars()
    }
    run_ticks = session.execute(
        select(TickRow).where(of_run, TickRow.tick.between(first - 1, last))
    ).scalars()
    ends = {tick.tick: tick.position for tick in run_ticks}
    watermark = _watermark_before(session, attempt)
    for tick in ticks:
        watermark = watermarks.get(tick.tick, watermark)
        segments = _segments(session, attempt.run_id, ends.get(tick.tick - 1, 0), tick.position)
        yield JournalEvaluation(tick.tick, tick.at_ns, watermark, tick.ended, segments)


def _watermark_before(session: Session, attempt: Attempt) -> int:
    step = session.execute(
        select(WatermarkRow.step)
        .where(
            WatermarkRow.run_id == attempt.run_id,
            WatermarkRow.attempt == attempt.attempt,
            WatermarkRow.tick < attempt.journaled,
        )
        .order_by(WatermarkRow.tick.desc())
        .limit(1)
    ).scalar_one_or_none()
    return -1 if step is None else step


def _segments(session: Session, run_id: int, start: int, end: int) -> tuple[JournalSegment, ...]:
    if start >= end:
        return ()
    rows = session.execute(
        select(Segment)
        .where(Segment.run_id == run_id, Segment.position >= start, Segment.position < end)
        .order_by(Segment.position)
    ).scalars()
    return tuple(JournalSegment(key_of(row), _ranks(row)) for row in rows)


def _ranks(row: Segment) -> tuple[RankRows, ...] | None:
    return None if row.ranks is None else tuple(RankRows(*entry) for entry in row.ranks)
