"""Numbers of events: within a project they grow in the order of commits, so that who has seen one has missed none before it.

A sequence alone does not give that: of two transactions, the one that took the lower number may commit last, and whoever
follows the events would have gone past it. So events are written at the very end of a transaction, under a lock of their
project, which holds until the commit is seen. SQLite has one writer at a time, and needs no lock.
"""

from __future__ import annotations

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from watchstep_services.db.models import EventRow, RunRow

_EVENTS = "watchstep_events"
_LOCK = 7_201_948  # the first half of the lock's name; any number, as long as it stays

_TAKE = text("SELECT pg_advisory_xact_lock(:lock, :project)")


def publish_at_end(session: Session, event: EventRow) -> None:
    """Write an event when its transaction ends, after everything else; in the order of the calls."""
    session.info.setdefault(_EVENTS, []).append(event)


def write_events(session: Session) -> None:
    """Write what `publish_at_end` was given. `Database.write` does it; nothing may follow but the commit."""
    events: list[EventRow] = session.info.pop(_EVENTS, [])
    if not events or not session.in_transaction():
        return
    session.flush()
    if session.get_bind().dialect.name == "postgresql":
        _lock(session, {event.run_id for event in events})
    session.add_all(events)
    session.flush()


def _lock(session: Session, run_ids: set[int]) -> None:
    """In one order, lest two transactions with events of two projects wait for each other."""
    projects = session.execute(
        select(func.hashtext(RunRow.project)).where(RunRow.id.in_(run_ids)).distinct()
    ).scalars()
    for project in sorted(projects):
        session.execute(_TAKE, {"lock": _LOCK, "project": project})
