"""The control document of a run: changed in the database, mirrored on the store.

The database's document is authoritative, and is part of answers to announcements. The store's is for workers without a service. Whoever
changes the document writes it to the store; if that fails, an outbox action does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from watchstep.format.capture_needs import CaptureNeed
from watchstep.format.control import ControlDocument, SnapshotRequest
from watchstep.format.layout import CONTROL_DOCUMENT
from watchstep.store.store import Store
from watchstep_services.core.due_action import AttemptResult, DueAction
from watchstep_services.core.events import make_event
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import RunRow
from watchstep_services.db.records import add_action, add_event
from watchstep_services.runs.stops import Subject, note
from watchstep_services.service.context import Service

MIRROR = "control"
"""The kind of actions that write a document to the store."""

_MIRROR_SECONDS = 10.0
"""Timeout of a request to a store. Nothing waits for the action, but other actions wait for its thread."""


def change(
    session: Session, run_id: int, changed: Callable[[ControlDocument], ControlDocument]
) -> ControlDocument:
    """Change a run's document, within a transaction. Concurrent changes are applied one after the other."""
    run = session.get_one(RunRow, run_id, with_for_update=True)
    before = ControlDocument.from_data(run.control)
    after = changed(before)
    if after.version != before.version:
        run.control = after.as_data()
    return after


def request_change(
    session: Session, run_id: int, changed: Callable[[ControlDocument], ControlDocument], event_id: str = ""
) -> int | None:
    """Change a run's document, and add an action that writes it to the store; return its id, None if nothing changed."""
    document = change(session, run_id, changed)
    cause = {"event_id": event_id, "at_ns": read_clock(session), "payload": {}}
    return add_action(session, run_id, MIRROR, f"control:{run_id}:{document.version}", cause)


def request_snapshot(session: Session, run_id: int, request: SnapshotRequest) -> int | None:
    """Request whole tensors from an attempt's workers; return the id of the action that writes the document to the store."""
    return request_change(session, run_id, lambda document: document.with_snapshot(request), request.id)


def set_cadence(session: Session, run_id: int, cadence: Mapping[str, int]) -> int | None:
    """Set intervals of collections, in steps; return the id of the action that writes the document to the store."""
    return request_change(session, run_id, lambda document: document.with_cadence(cadence))


def set_needs(session: Session, run_id: int, needs: Sequence[CaptureNeed]) -> int | None:
    """Set what the rules of a run need its workers to capture; return the id of the action that writes the document to the store.

    Returns None, and adds no action, if the document has these needs.
    """
    run = session.get_one(RunRow, run_id)
    if ControlDocument.from_data(run.control).with_needs(needs).version == run.control.get("version", 0):
        return None
    return request_change(session, run_id, lambda document: document.with_needs(needs))


@dataclass(frozen=True)
class RestartPermission:
    """Who allows a stopped run to start again, why, and for which attempt; empty for all."""

    who: str
    reason: str
    attempt: str = ""


def allow_restart(session: Session, base_url: str, run_id: int, permission: RestartPermission) -> int | None:
    """Allow new attempts of a stopped run to start, with an event and an audit entry on who allowed it and why.

    Returns:
        The id of the action that writes the document to the store; None if they may start already.
    """
    run = session.get_one(RunRow, run_id, with_for_update=True)
    before = ControlDocument.from_data(run.control)
    if not before.tombstone or (permission.attempt and before.admitted == permission.attempt):
        return None
    data = {
        "attempt": run.attempt,
        "allowed_by": permission.who,
        "reason": permission.reason,
        "was_stopped": before.tombstone,
    }
    if permission.attempt:
        data["admitted"] = permission.attempt
    now = read_clock(session)
    note(session, "restart_allowed", Subject(run.project, run.run, run.attempt), permission.who, now, data)
    event = make_event("io.watchstep.run.restart_allowed", base_url, (run.project, run.run), now, data)
    add_event(session, run_id, event, now)
    if permission.attempt:
        return request_change(
            session, run_id, lambda document: document.with_admitted(permission.attempt), event.id
        )
    return request_change(session, run_id, ControlDocument.without_tombstone, event.id)


def mirror(service: Service, run_id: int, run_store: Store) -> ControlDocument:
    """Write a run's document to its store, and repeat until the newest version was written last.

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
    """Execute an outbox action of kind `MIRROR`.

    Raises:
        StoreError, ConfigError: the store cannot be opened, or refused.
    """
    with service.database.read() as session:
        run = session.get_one(RunRow, due.run_id)
        place = run.place
    run_store = service.stores.of_run(place, run.run)
    written = service.bulkhead.call_urgent(
        place.registration, lambda: mirror(service, due.run_id, run_store), _MIRROR_SECONDS
    )
    return AttemptResult("done", f"version {written.version} is on the store")


def _document(service: Service, run_id: int) -> ControlDocument:
    with service.database.read() as session:
        return ControlDocument.from_data(session.get_one(RunRow, run_id).control)
