"""The database's clock, by which all workers agree on the time, and its correction after it was set back.

All due times, leases and waiting times refer to the database's clock, and SQLite's is the machine's. If it is set
back by an hour, all of them would lie an hour ahead. So the clock's highest value is stored, and if the clock is
below it, every stored time that lies ahead is moved by the same distance:

    follows ── the clock is below its mark ──▶ times ahead move ── after `AGAIN_NS` ──▶ times written late move ──▶ follows

Work that began before the step may commit times of the old clock after it; these lie beyond the old clock, and are moved later.
Times at which something happened, and times that people chose (silences, ends of tokens), are not moved.
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
    ProjectStore,
    RunRow,
    Segment,
    Upkeep,
)

_REPLACED = "watchstep_clock"


class now_ns(FunctionElement[int]):  # noqa: N801 - reads as the SQL function that it is
    """Nanoseconds since the epoch by the database's clock, at the statement and not at the start of the transaction.

    SQLite's resolution is a millisecond, PostgreSQL's a microsecond.
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
    """Replace an engine's clock with a SQL expression before its first statement, for tests that control the time.

    Args:
        engine: the engine.
        expression: SQL for nanoseconds since the epoch, for example ``(SELECT now_ns FROM test_clock)``.
    """
    setattr(engine.dialect, _REPLACED, expression)
    engine.clear_compiled_cache()


def clock_expression(dialect: Dialect) -> str:
    """The clock as SQL of a dialect, for statements that are written as text."""
    return str(now_ns().compile(dialect=dialect))


def read_clock(session: Session) -> int:
    """The current time, in nanoseconds since the epoch."""
    return int(session.execute(select(now_ns())).scalar_one())


MARK_NS = 5 * NANOSECONDS
"""Interval at which the clock is recorded; a shorter step back delays due work by no more."""
TOLERANCE_NS = NANOSECONDS
AGAIN_NS = 120 * NANOSECONDS
"""Time after which work that began before a step has committed."""

_MARK = 1
_log = logging.getLogger(__name__)

_Column = InstrumentedAttribute[Any]

MOMENTS: tuple[tuple[Sequence[_Column], Any], ...] = (
    (
        (
            RunRow.due_ns, RunRow.lease_until_ns, RunRow.requested_ns, RunRow.poll_ns, RunRow.listed_ns, RunRow.last_seen_ns, RunRow.urgent_ns,
            RunRow.registered_ns, RunRow.evaluated_ns, RunRow.ignored_ns,
        ),
        None,
    ),
    ((Project.deferred_until_ns,), None),
    ((ProjectStore.listed_ns,), None),
    ((Attempt.first_seen_ns, Attempt.journal_due_ns), None),
    ((BoundJobRow.gone_ns,), None),
    ((Segment.found_ns,), Segment.state == "announced"),
    ((ActionRow.next_ns, ActionRow.stage_since_ns), ActionRow.state == "pending"),
    ((AlertGroup.due_ns, AlertGroup.notified_ns), None),
    ((Upkeep.next_ns, Upkeep.lease_until_ns), None),
    ((Backtest.lease_until_ns,), Backtest.state != "done"),
)  # fmt: skip
"""Columns of each table with a due time, a deadline, or the beginning of a waiting time, and a condition on the rows."""


def follow_clock(database: Database) -> int:
    """Record the clock, and move stored times if it was set back.

    Returns:
        How far it was set back, in nanoseconds; 0 if it was not.
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
            return 0  # another process has done it meanwhile
        if now < mark.seen_ns - TOLERANCE_NS:
            step = mark.seen_ns - now
            _move(session, now, step)
            mark.before_ns, mark.stepped_ns, mark.seen_ns = mark.seen_ns, now, now
            _log.warning(
                "the database's clock was set back by %.0f s: due times are moved by the same",
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
    """Move times beyond a given one."""
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
