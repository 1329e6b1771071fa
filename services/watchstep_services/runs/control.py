"""The control document of a run: changed in the database, mirrored on the store.

The database's is the truth, and answers announcements. The store's is for workers that no service answers; whoever changes
the document writes it there, and an outbox action sees to it where that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.format.control import ControlDocument, SnapshotRequest
from watchstep.format.layout import CONTROL_DOCUMENT
from watchstep.store.store import Store
from watchstep_services.core.due_action import AttemptResult, DueAction
from watchstep_services.core.events import make_event
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import Project, RunRow
from watchstep_services.db.records import add_action, add_event
from watchstep_services.runs.stops import Subject, note
from watchstep_services.service.context import Service

MIRROR = "control"
"""The kind of the actions that bring a document to the store."""

_MIRROR_SECONDS = 10.0
"""As long as a request to a store may take: nobody waits for the action, but others wait for its thread."""


def change(
    session: Session, run_id: int, changed: Callable[[ControlDocument], ControlDocument]
) -> ControlDocument:
    """Change a run's document, within a transaction; of several at once each sees what the one before it left."""
    run = session.get_one(RunRow, run_id, with_for_update=True)
    before = ControlDocument.from_data(run.control)
    after = changed(before)
    if after.version != before.version:
        run.control = after.as_data()
    return after


def ask(
    session: Session, run_id: int, changed: Callable[[ControlDocument], ControlDocument], event_id: str = ""
) -> int | None:
    """Change a run's document, and have the store told by an action; returns its id, None where nothing changed."""
    document = change(session, run_id, changed)
    cause = {"event_id": event_id, "at_ns": read_clock(session), "payload": {}}
    return add_action(session, run_id, MIRROR, f"control:{run_id}:{document.version}", cause)


def ask_for_snapshot(session: Session, run_id: int, request: SnapshotRequest) -> int | None:
    """Have an attempt's workers take full tensors; returns the id of the action that tells the store."""
    return ask(session, run_id, lambda document: document.with_snapshot(request), request.id)


def set_cadence(session: Session, run_id: int, cadence: Mapping[str, int]) -> int | None:
    """Have collections measured every so many steps; returns the id of the action that tells the store."""
    return ask(session, run_id, lambda document: document.with_cadence(cadence))


@dataclass(frozen=True)
class Allowing:
    """Who lets a stopped run start again, why, and which attempt alone; empty for all."""

    who: str
    reason: str
    attempt: str = ""


def allow_restart(session: Session, base_url: str, run_id: int, allowing: Allowing) -> int | None:
    """Let new attempts of a stopped run start, with an event and a line in the audit log that say who allowed it and why.

    Returns:
        The id of the action that tells the store; None where they may start already.
    """
    run = session.get_one(RunRow, run_id, with_for_update=True)
    before = ControlDocument.from_data(run.control)
    if not before.tombstone or (allowing.attempt and before.admitted == allowing.attempt):
        return None
    data = {
        "attempt": run.attempt,
        "allowed_by": allowing.who,
        "reason": allowing.reason,
        "was_stopped": before.tombstone,
    }
    if allowing.attempt:
        data["admitted"] = allowing.attempt
    now = read_clock(session)
    note(session, "restart_allowed", Subject(run.project, run.run, run.attempt), allowing.who, now, data)
    event = make_event("watchstep.run.restart_allowed", base_url, (run.project, run.run), now, data)
    add_event(session, run_id, event, now)
    if allowing.attempt:
        return ask(session, run_id, lambda document: document.with_admitted(allowing.attempt), event.id)
    return ask(session, run_id, ControlDocument.without_tombstone, event.id)


def mirror(service: Service, run_id: int, run_store: Store) -> ControlDocument:
    """Write a run's document to its store; looked at once more, lest an older one be the last to arrive.

    Raises:
        StoreError: the store refused.
    """
    written = _document(service, run_id)
    while True:
        run_store.put(CONTROL_DOCUMENT, written.encode())
        newest = _document(service, run_id)
        if newest.version == written.version:
            return written
        written = newest


def try_mirror(service: Service, due: DueAction) -> AttemptResult:
    """An outbox action of kind `MIRROR`.

    Raises:
        StoreError, ConfigError: the store cannot be opened, or refused.
    """
    with service.database.read() as session:
        run, project = session.execute(
            select(RunRow, Project)
            .join(Project, Project.name == RunRow.project)
            .where(RunRow.id == due.run_id)
        ).one()
    place = project.place
    run_store = service.stores.of_run(place, run.run)
    written = service.patience.ask_now(
        place.registration, lambda: mirror(service, due.run_id, run_store), _MIRROR_SECONDS
    )
    return AttemptResult("done", f"version {written.version} is on the store")


def _document(service: Service, run_id: int) -> ControlDocument:
    with service.database.read() as session:
        return ControlDocument.from_data(session.get_one(RunRow, run_id).control)
