"""What the database knows of a run when it is claimed: segments that wait, its attempts, and whether anything is unusual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, Connection, bindparam, exists, func, select

from watchstep.format.layout import SegmentKey, WriterId
from watchstep_rules.engine.alert_memory import Phase
from watchstep_services.db.engine import Database
from watchstep_services.db.models import AlertInstanceRow, Attempt, RunRow, Segment
from watchstep_services.evaluation.plan import InboxEntry

FAILED_ATTEMPTS = "failed_attempts"
"""In a run's health: attempt → why its last evaluation failed."""


@dataclass(frozen=True)
class Inbox:
    """What there is of a run.

    Attributes:
        entries: segments that were announced and not read.
        attempts: rows of its attempts, by name; not to be written.
        calm: no alert of it fires, and its last evaluation did not fail.
        failing: attempts whose last evaluation failed; they come after the others.
    """

    entries: list[InboxEntry]
    attempts: dict[str, Attempt]
    calm: bool
    failing: frozenset[str] = frozenset()


def open_inbox(database: Database, run_id: int) -> Inbox:
    """Ask for all of it: on PostgreSQL at once."""
    of = {"of_run": run_id}
    with database.bare() as connection:
        if connection.dialect.name == "sqlite":
            return _one_by_one(connection, of)
        segments, attempts, *troubles = connection.execute(_AT_ONCE, of).one()
    return _opened(segments or (), attempts or (), *troubles)


def _one_by_one(connection: Connection, of: dict[str, Any]) -> Inbox:
    segments = connection.execute(_SEGMENTS, of).all()
    attempts = connection.execute(_ATTEMPTS, of).all()
    return _opened(segments, attempts, *connection.execute(select(*_TROUBLES), of).one())


def _opened(segments: Any, attempts: Any, fires: Any, failed: Any, failing: Any) -> Inbox:
    entries = [
        InboxEntry(row_id, SegmentKey(WriterId(attempt, node, writer), seq, first, last), found_ns, trace)
        for row_id, attempt, node, writer, seq, first, last, found_ns, trace in segments
    ]
    rows = [Attempt(**dict(zip(_NAMES, values, strict=True))) for values in attempts]
    calm = not (fires or failed or failing)
    return Inbox(entries, {row.attempt: row for row in rows}, calm, frozenset(failing or ()))


# Made once: every evaluation asks it.
_OF_SEGMENT = (
    Segment.id, Segment.attempt, Segment.node, Segment.writer, Segment.seq, Segment.first, Segment.last,
    Segment.found_ns, Segment.traceparent,
)  # fmt: skip
_NAMES = [column.key for column in Attempt.__table__.columns]
_OF_ATTEMPT = [getattr(Attempt, name) for name in _NAMES]
_RUN: BindParameter[Any] = bindparam("of_run")
_WAITS = (Segment.run_id == _RUN, Segment.state == "announced")
_SEGMENTS = select(*_OF_SEGMENT).where(*_WAITS)
_ATTEMPTS = select(*_OF_ATTEMPT).where(Attempt.run_id == _RUN)
_FIRES = exists().where(AlertInstanceRow.run_id == _RUN, AlertInstanceRow.phase == Phase.FIRING.value)
_FAILED = (
    select(RunRow.health["evaluation"].as_string().is_not(None)).where(RunRow.id == _RUN).scalar_subquery()
)
_FAILING = select(RunRow.health[FAILED_ATTEMPTS]).where(RunRow.id == _RUN).scalar_subquery()
_TROUBLES = (_FIRES, _FAILED, _FAILING)
_AT_ONCE = select(
    select(func.json_agg(func.json_build_array(*_OF_SEGMENT))).where(*_WAITS).scalar_subquery(),
    select(func.json_agg(func.json_build_array(*_OF_ATTEMPT)))
    .where(Attempt.run_id == _RUN)
    .scalar_subquery(),
    *_TROUBLES,
)
