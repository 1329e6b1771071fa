"""Events of a project after a place, from the database, as they are sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from watchstep_services.core.rule_addresses import without_addresses
from watchstep_services.db.engine import Database
from watchstep_services.db.models import EventRow, RunRow


@dataclass(frozen=True)
class Sent:
    """An event in the form of a stream.

    Attributes:
        number: its place.
        run_id: whose it is.
        type: of the event.
        text: what is sent.
    """

    number: int
    run_id: int
    type: str
    text: bytes


@dataclass(frozen=True)
class Wanted:
    """Which events of a project: of one run, or of all; of some types, or of all."""

    run_id: int | None = None
    types: frozenset[str] = frozenset()

    def has(self, sent: Sent) -> bool:
        """Whether an event is one of them."""
        return (self.run_id is None or sent.run_id == self.run_id) and (
            not self.types or sent.type in self.types
        )


def read_after(database: Database, project: str, after: int, wanted: Wanted, limit: int) -> list[Sent]:
    """The next events after a number, in order."""
    chosen = (
        select(EventRow.number, EventRow.run_id, EventRow.type, EventRow.event)
        .join(RunRow, RunRow.id == EventRow.run_id)
        .where(RunRow.project == project, EventRow.number > after)
    )
    if wanted.run_id is not None:
        chosen = chosen.where(EventRow.run_id == wanted.run_id)
    if wanted.types:
        chosen = chosen.where(EventRow.type.in_(wanted.types))
    with database.read() as session:
        rows = session.execute(chosen.order_by(EventRow.number).limit(limit)).all()
    return [Sent(number, run_id, kind, encode(number, kind, event)) for number, run_id, kind, event in rows]


def last_number(database: Database, project: str) -> int:
    """The number of a project's newest event; 0 where it has none."""
    newest = (
        select(func.max(EventRow.number))
        .join(RunRow, RunRow.id == EventRow.run_id)
        .where(RunRow.project == project)
    )
    with database.read() as session:
        return session.execute(newest).scalar_one() or 0


def encode(number: int, kind: str, event: dict[str, Any]) -> bytes:
    """An event of a stream; JSON has no line breaks of its own."""
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(without_addresses(event), separators=(',', ':'))}\n\n".encode()
