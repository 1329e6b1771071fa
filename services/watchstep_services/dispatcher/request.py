"""Ask for a stop, within a transaction: one for each attempt, whoever asks and how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import Session

from watchstep_services.database.clock import read_clock
from watchstep_services.database.models import Run
from watchstep_services.database.records import add_action, add_event
from watchstep_services.dispatcher.audit import Subject, note
from watchstep_services.events import make_event


@dataclass(frozen=True)
class Asked:
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
    asked: Asked | None = None,
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
        The action's id; None where the attempt has been asked to stop already.
    """
    cause_id, reason = because
    run = session.get_one(Run, run_id)
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
    if action is not None:
        add_event(session, run_id, event, now)
    _audit(session, Subject(run.project, run.run, attempt), asked, now, data, repeated=action is None)
    return action


def _audit(
    session: Session,
    subject: Subject,
    asked: Asked | None,
    now: int,
    data: dict[str, Any],
    *,
    repeated: bool,
) -> None:
    held = asked or Asked("an operator")
    told = {"reason": data["reason"], "cause": data["cause"], **held.told}
    note(session, "repeated" if repeated else "requested", subject, held.who, now, told)
