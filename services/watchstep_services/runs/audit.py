"""The story of every stop, line by line. Lines are only added, and outlive the run that they tell of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy.orm import Session

from watchstep_services.db.models import AuditEntry
from watchstep_services.db.models.alert_life import WHO_LENGTH

Kind = Literal[
    "requested", "repeated", "would_have", "tried", "ended", "allowed", "revoked", "restart_allowed"
]


@dataclass(frozen=True)
class Subject:
    """Whose stop; run and attempt are empty for a word that holds for a project."""

    project: str
    run: str = ""
    attempt: str = ""


def note(session: Session, kind: Kind, subject: Subject, who: str, at_ns: int, data: dict[str, Any]) -> None:
    """Add a line.

    Args:
        session: the transaction in which it happens.
        kind: ``requested``: a stop was asked for; ``repeated``: again, of an attempt that had been asked; ``would_have``: a rule
            that may not stop would have; ``tried``, ``ended``: what became of it; ``allowed``, ``revoked``: a rule may stop, or no
            longer; ``restart_allowed``: what was stopped may start again.
        subject: whose stop.
        who: asked, tried or allowed.
        at_ns: when.
        data: the rest, JSON-ready.
    """
    session.add(
        AuditEntry(
            project=subject.project,
            run=subject.run,
            attempt=subject.attempt,
            kind=kind,
            at_ns=at_ns,
            who=who[:WHO_LENGTH],
            data=data,
        )
    )
