"""The database's own clock, so that several workers on several machines agree on the time, and what follows when it is set back.

Everything that is due, leased or waited for is a moment by the database's clock, and SQLite's is the machine's. Where that is set
back by an hour, all of it would lie an hour ahead. So the clock's highest value is stored, and when the clock is
below it, every stored moment that lies ahead is moved by the same distance:

    follows ── the clock is below what was seen ──▶ moments ahead move ── after `_AGAIN_NS` ──▶ those written late move ──▶ follows

What was begun before the step may commit moments of the old time after it: these lie beyond the old time, and are moved once more.
Moments that say when something happened, and moments that people chose (silences, ends of tokens), stay.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, Dialect, Engine, Table, and_, case, or_, select, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.sql.functions import FunctionElement

from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.db.engine import Database, insert_missing
from watchstep_services.db.models import (
    ActionRow,
    AlertGroup,
    Attempt,
    Backtest,
    BoundJobRow,
    ClockMark,
    Project,
    RunRow,
    Segment,
    Upkeep,
)

_REPLACED = "watchstep_clock"


class now_ns(FunctionElement[int]):  # noqa: N801 - reads as the SQL function that it is
    """Nanoseconds since the epoch by the database's clock, at the statement and not at the transaction's start.

    SQLite counts in milliseconds, PostgreSQL in microseconds.
    """

    type = BigInteger()
    inherit_cache = True


@compiles(now_ns, "sqlite")
def _sqlite(_element: now_ns, compiler: Any, **_options: Any) -> str:
    own = "(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000000)"
    return str(getattr(compiler.dialect, _REPLACED, own))


@compiles(now_ns, "postgresql")
def _postgresql(_element: now_ns, compiler: Any, **_options: Any) -> str:
    own = "(CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT) * 1000)"
    return str(getattr(compiler.dialect, _REPLACED, own))


def replace_clock(engine: Engine, expression: str) -> None:
    """Have an engine that has run nothing yet take the time from a SQL expression: tests that move a clock themselves do.

    Args:
        engine: whose statements.
        expression: SQL that gives nanoseconds since the epoch, as ``(SELECT now_ns FROM test_clock)``.
    """
    setattr(engine.dialect, _REPLACED, expression)
    engine.clear_compiled_cache()


def clock_expression(dialect: Dialect) -> str:
    """The time in an engine's SQL, for statements that are written as text."""
    return str(now_ns().compile(dialect=dialect))


def read_clock(session: Session) -> int:
    """The time now, in nanoseconds since the epoch."""
    return int(session.execute(select(now_ns())).scalar_one())


MARK_NS = 5 * NANOSECONDS
"""So often the clock is noted; a step back shorter than that delays what is due by no more."""
TOLERANCE_NS = NANOSECONDS
AGAIN_NS = 120 * NANOSECONDS
"""Work that began before a step has written its moments by then."""

_MARK = 1
_log = logging.getLogger(__name__)

_Column = InstrumentedAttribute[Any]

MOMENTS: tuple[tuple[Sequence[_Column], Any], ...] = (
    (
        (
            RunRow.due_ns, RunRow.lease_until_ns, RunRow.requested_ns, RunRow.poll_ns, RunRow.listed_ns, RunRow.last_seen_ns, RunRow.urgent_ns,
        ),
        None,
    ),
    ((Project.listed_ns, Project.deferred_until_ns), None),
    ((Attempt.first_seen_ns, Attempt.journal_due_ns), None),
    ((BoundJobRow.gone_ns,), None),
    ((Segment.found_ns,), Segment.state == "announced"),
    ((ActionRow.next_ns, ActionRow.stage_since_ns), ActionRow.state == "pending"),
    ((AlertGroup.due_ns, AlertGroup.notified_ns), None),
    ((Upkeep.next_ns, Upkeep.lease_until_ns), None),
    ((Backtest.lease_until_ns,), Backtest.state != "done"),
)  # fmt: skip
"""Columns of one table each that say when something is due, is over, or began to be waited for; and of which rows."""


def follow_clock(database: Database) -> int:
    """Note how far the clock has come; where it was set back, move what lies ahead.

    Returns:
        How far it was set back, in nanoseconds; 0 where it goes on.
    """
    with database.read() as session:
        now, mark = read_clock(session), session.get(ClockMark, _MARK)
        if mark is not None and not _is_due(mark, now):
            return 0
    with database.write() as session:
        mark = session.get(ClockMark, _MARK, with_for_update=True, populate_existing=True)
        now = read_clock(session)
        if mark is None:
            insert_missing(session, ClockMark, {"id": _MARK, "seen_ns": now, "before_ns": 0, "stepped_ns": 0})
            return 0
        if not _is_due(mark, now):
            return 0  # another process has just done it
        if now < mark.seen_ns - TOLERANCE_NS:
            step = mark.seen_ns - now
            _move(session, now, step)
            mark.before_ns, mark.stepped_ns, mark.seen_ns = mark.seen_ns, now, now
            _log.warning(
                "the database's clock was set back by %.0f s: what was to come is brought forward",
                step / NANOSECONDS,
            )
            return step
        if mark.before_ns and now >= mark.stepped_ns + AGAIN_NS:
            if now < mark.before_ns:
                _move(session, mark.before_ns, mark.before_ns - mark.stepped_ns)
            mark.before_ns = 0
        mark.seen_ns = max(mark.seen_ns, now)
        return 0


def _is_due(mark: ClockMark, now: int) -> bool:
    again = bool(mark.before_ns) and now >= mark.stepped_ns + AGAIN_NS
    return again or now < mark.seen_ns - TOLERANCE_NS or now >= mark.seen_ns + MARK_NS


def _move(session: Session, beyond_ns: int, by_ns: int) -> None:
    """Move what lies beyond a moment."""
    for columns, rows in MOMENTS:
        ahead = or_(*(column > beyond_ns for column in columns))
        table = columns[0].class_.__table__
        assert isinstance(table, Table)
        session.execute(
            update(table)
            .where(ahead if rows is None else and_(rows, ahead))
            .values(
                {column.key: case((column > beyond_ns, column - by_ns), else_=column) for column in columns}
            )
        )
