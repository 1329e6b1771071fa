"""That somebody was not told of an alert, and why: kept, so that nobody has to wonder."""

from __future__ import annotations

from typing import Literal

from sqlalchemy.orm import Session

from watchstep_services.database.models import Muted, Standing
from watchstep_services.database.models.alert_life import WHO_LENGTH
from watchstep_services.database.upsert import insert_missing

Reason = Literal["info", "dry_run", "inhibited", "silenced", "acknowledged", "known", "unknown", "incident"]
WEBHOOK = "webhook"
NOBODY = ""


def mute(session: Session, row: Standing, receiver: str, why: tuple[Reason, str], at_ns: int) -> None:
    """Note, once for each time that the alert began to fire, that a receiver was not told.

    Args:
        session: the transaction.
        row: the alert.
        receiver: who; `WEBHOOK` for the addresses of its rule config, `NOBODY` where nobody at all is told.
        why: ``info``: a note, of which nobody is told; ``dry_run``; ``inhibited``, by which rule config; ``silenced``, by which silence; ``acknowledged``, by whom: it is not
            repeated; ``known``: it fired on an earlier attempt already; ``unknown``: there is no such receiver; ``incident``, by the incident's id: its notification was sent before, and the next one names the alert.
        at_ns: when.
    """
    reason, detail = why
    values = {
        "standing_id": row.id,
        "episode": row.episode,
        "receiver": receiver,
        "reason": reason,
        "detail": detail[:WHO_LENGTH],
        "at_ns": at_ns,
    }
    insert_missing(session, Muted, values)
