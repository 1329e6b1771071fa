"""Rows that several modules write in the same way: events, actions, inbox entries, hints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Table, and_, case, select, tuple_, update
from sqlalchemy.orm import Session

from watchstep.format.layout import SegmentKey
from watchstep_services.core.events import CloudEvent
from watchstep_services.core.telemetry import tracing
from watchstep_services.db.clock import now_ns
from watchstep_services.db.engine import insert_all_missing, insert_missing, publish_at_end
from watchstep_services.db.models import ActionRow, EventRow, RunRow, Segment

RUNS: Table = RunRow.__table__  # type: ignore[assignment]
"""For statements that do not use the mapping, because every announcement executes some."""


MOST_WAITING = 4_000
"""Segments of a run that wait for their evaluation, from which on announcements are ignored and listings add few: every evaluation sorts
all of them. The store has what was left out, and listings find it."""


def add_event(session: Session, run_id: int, event: CloudEvent, at_ns: int) -> None:
    """Publish an event when the transaction commits."""
    content = event.model_dump(mode="json")
    row = EventRow(id=event.id, run_id=run_id, type=event.type, event=content, created_ns=at_ns)
    publish_at_end(session, row)


def add_action(session: Session, run_id: int, kind: str, key: str, cause: dict[str, Any]) -> int | None:
    """Add an action to the outbox, due at once.

    Args:
        session: the transaction.
        run_id: id of the run.
        kind: kind of the action.
        key: an action with the same key is added only once.
        cause: ``event_id``, ``at_ns``, and the action's payload.

    Returns:
        The action's id; None if the key exists.
    """
    at_ns = int(cause["at_ns"])
    values = {
        "key": key,
        "run_id": run_id,
        "event_id": str(cause["event_id"]),
        "kind": kind,
        "payload": dict(cause["payload"]),
        "stage": 0,
        "stage_since_ns": at_ns,
        "state": "pending",
        "claims": 0,
        "tries": 0,
        "next_ns": at_ns,
        "created_ns": at_ns,
        "outcome": "",
        "traceparent": tracing.current(),
    }
    if not insert_missing(session, ActionRow, values):
        return None
    return session.execute(select(ActionRow.id).where(ActionRow.key == key)).scalar_one()


def put_segments(
    session: Session, run_id: int, keys: Sequence[SegmentKey], at_ns: int, *, listed: bool = False
) -> int:
    """Add segments to the inbox of a run, in few statements, because SQLite has one writer.

    Segments that were given up as missing are added again, once. The steps of a listing replace those of an announcement.

    Args:
        session: the transaction.
        run_id: id of the run.
        keys: the segments, each once; a request or a portion of a listing has some hundreds.
        at_ns: the time, by the database's clock.
        listed: whether a listing found them.

    Returns:
        The number of segments that are new to read.
    """
    if not keys:
        return 0
    added = _insert_segments(session, run_id, keys, at_ns)
    if added == len(keys):
        return added
    return added + _renew_segments(session, run_id, keys, at_ns, listed=listed)


_OF_WRITER = tuple_(Segment.attempt, Segment.node, Segment.writer, Segment.seq)


def _insert_segments(session: Session, run_id: int, keys: Sequence[SegmentKey], at_ns: int) -> int:
    shared = {
        "run_id": run_id,
        "state": "announced",
        "found_ns": at_ns,
        "problem": "",
        "traceparent": tracing.current(),
    }
    rows = [
        {
            **shared,
            "attempt": key.writer.attempt,
            "node": key.writer.node,
            "writer": key.writer.writer,
            "seq": key.seq,
            "first": key.first,
            "last": key.last,
        }
        for key in keys
    ]
    return insert_all_missing(session, Segment, rows)


def _renew_segments(
    session: Session, run_id: int, keys: Sequence[SegmentKey], at_ns: int, *, listed: bool
) -> int:
    """Change the rows of segments that were given up, or, of a listing, that were announced with other steps; return their number."""
    states = ("missing", "announced") if listed else ("missing",)
    of = {(key.writer.attempt, key.writer.node, key.writer.writer, key.seq): key for key in keys}
    rows = session.execute(
        select(Segment).where(Segment.run_id == run_id, Segment.state.in_(states), _OF_WRITER.in_(of))
    ).scalars()
    renewed = 0
    for row in rows:
        key = of[row.attempt, row.node, row.writer, row.seq]
        if row.state == "missing":
            row.state, row.found_ns = "announced", at_ns
        elif (row.first, row.last) == (key.first, key.last):
            continue
        row.first, row.last = key.first, key.last
        renewed += 1
    return renewed


def hint(
    session: Session, run_id: int, *, requested: bool = False, also: Mapping[str, Any] | None = None
) -> None:
    """Record that a run has work, so that a sweep finds it even if other hints are lost.

    A run that is already due keeps its place in the queue.

    Args:
        session: the transaction.
        run_id: id of the run.
        requested: a message follows or was sent, so the sweep need not send one at once.
        also: further columns of the run, so that its row is written once.
    """
    waiting = and_(RunRow.due_ns.is_not(None), RunRow.due_ns <= now_ns())
    values = {
        **(also or {}),
        "hints": RunRow.hints + 1,
        "due_ns": case((waiting, RunRow.due_ns), else_=now_ns()),
    }
    # Without a message the sweep sends one at once, regardless of when the last one was sent.
    values["requested_ns"] = case((waiting, RunRow.requested_ns), else_=now_ns() if requested else 0)
    session.execute(update(RUNS).where(RUNS.c.id == run_id).values(values))
