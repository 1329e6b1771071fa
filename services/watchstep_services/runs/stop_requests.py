"""Stop requests: one for each attempt, whoever requests it and how often; and the stages of a stop.

    ASK → ASKED → TERMINATING → TERMINATED → KILLING → KILLED

A stage that ends in -ING is committed before its signal is sent: whoever finds it sends the signal again, or finds the job
gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep_services.core.events import make_event
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import ActionRow, RunRow
from watchstep_services.db.records import add_action, add_event
from watchstep_services.runs.audit import Subject, note

ASK, ASKED, TERMINATED, KILLED, UNCONFIRMED, TERMINATING, KILLING = 0, 1, 2, 3, 4, 5, 6
"""Not begun; all workers asked; the job asked to end; killed; asked, and nobody can say that anything came of it; about to be asked
to end; about to be killed."""

INTENDED = {TERMINATING: TERMINATED, KILLING: KILLED}
"""Of a stage whose signal may have been sent: the stage that it comes to."""


@dataclass(frozen=True)
class StopRequester:
    """Who asks for a stop, and what the audit log is to hold of it: by whose word, on which evidence."""

    who: str
    told: dict[str, Any] = field(default_factory=dict)


def stop_key(run_id: int, attempt: str) -> str:
    """The key of a stop. An attempt has one job at most, so this is a key of the job as well."""
    return f"stop:{run_id}:{attempt}"


def request_stop(
    session: Session,
    base_url: str,
    run_id: int,
    attempt: str,
    because: tuple[str, str],
    asked: StopRequester | None = None,
) -> int | None:
    """Put a stop into the outbox, with its event and a line in the audit log.

    Args:
        session: the transaction.
        base_url: of the API.
        run_id: which run.
        attempt: which attempt of it.
        because: id of the event that caused it (empty for an operator), and the reason for people.
        asked: for the audit log; an operator where it is left out.

    Returns:
        The action's id; None where the attempt has been asked to stop already. One that goes on though it was asked, for
        the stop could reach nothing, is asked anew: its job may have been bound since.
    """
    cause_id, reason = because
    run = session.get_one(RunRow, run_id)
    now = read_clock(session)
    data = {"attempt": attempt, "reason": reason, "cause": cause_id}
    event = make_event("watchstep.stop.requested", base_url, (run.project, run.run), now, data)
    payload = {"attempt": attempt, "reason": reason, "cause": cause_id or event.id}
    action = add_action(
        session,
        run_id,
        "stop",
        stop_key(run_id, attempt),
        {"event_id": event.id, "at_ns": now, "payload": payload},
    )
    if action is None:
        action = _again(session, run, attempt, {"event_id": event.id, "at_ns": now, "payload": payload})
    if action is not None:
        add_event(session, run_id, event, now)
    _audit(session, Subject(run.project, run.run, attempt), asked, now, data, repeated=action is None)
    return action


def _again(session: Session, run: RunRow, attempt: str, cause: dict[str, Any]) -> int | None:
    """Take up a stop that came to nothing; None where it is on its way, did end the attempt, or there is nothing to stop."""
    row = session.execute(
        select(ActionRow).where(ActionRow.key == stop_key(run.id, attempt)).with_for_update()
    ).scalar_one()
    if not (_is_in_vain(row) and _goes_on(run, attempt)):
        return None
    row.state, row.stage, row.stage_since_ns, row.finished_ns = "pending", 0, cause["at_ns"], None
    row.next_ns, row.event_id, row.payload = cause["at_ns"], cause["event_id"], dict(cause["payload"])
    return row.id


def take_up(session: Session, run_id: int, attempt: str) -> int | None:
    """Carry out a stop that reached nothing, now that the attempt's job is known; within the transaction that binds it.

    Nobody asks again by itself: the alert that asked for the stop goes on firing.

    Returns:
        The action's id; None where there is no such stop.
    """
    row = session.execute(
        select(ActionRow).where(ActionRow.key == stop_key(run_id, attempt)).with_for_update()
    ).scalar_one_or_none()
    if row is None or not _is_in_vain(row):
        return None
    run, now = session.get_one(RunRow, run_id), read_clock(session)
    if not _goes_on(run, attempt):
        return None
    row.state, row.stage, row.stage_since_ns, row.finished_ns, row.next_ns = "pending", 0, now, None, now
    told = {"reason": row.payload["reason"], "cause": row.payload["cause"], "detail": "its job was bound"}
    note(session, "repeated", Subject(run.project, run.run, attempt), "the service", now, told)
    return row.id


def _is_in_vain(row: ActionRow) -> bool:
    return row.state in ("failed", "skipped") or (row.state == "done" and row.stage == UNCONFIRMED)


def _goes_on(run: RunRow, attempt: str) -> bool:
    return run.attempt == attempt and (run.ended_ns is None or run.state == "lost")


def _audit(
    session: Session,
    subject: Subject,
    asked: StopRequester | None,
    now: int,
    data: dict[str, Any],
    *,
    repeated: bool,
) -> None:
    held = asked or StopRequester("an operator")
    told = {"reason": data["reason"], "cause": data["cause"], **held.told}
    note(session, "repeated" if repeated else "requested", subject, held.who, now, told)
