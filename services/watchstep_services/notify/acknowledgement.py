"""Acknowledgements: somebody has taken an alert up, so it is not repeated until it is over. A new firing needs a new one."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError
from watchstep_services.core.events import make_event
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import AlertGroup, AlertInstanceRow, GroupMember, RunRow
from watchstep_services.db.records import add_event
from watchstep_services.notify.silences import mute


def acknowledge(session: Session, base_url: str, row: AlertInstanceRow, who: str, comment: str) -> None:
    """Note who has taken an alert up, with an event. Of one who did before, the comment is replaced.

    Raises:
        ConfigError: it does not fire.
    """
    if row.phase != "firing":
        raise ConfigError(
            f"alert {row.name}: it is {row.phase}, not firing", "acknowledge it when it fires again"
        )
    now = read_clock(session)
    row.acknowledged_by, row.acknowledged_ns, row.acknowledgement = who, now, comment
    run = session.get_one(RunRow, row.run_id)
    data = {
        "attempt": row.attempt,
        "name": row.name,
        "rule": row.rule,
        "fingerprint": row.fingerprint,
        "episode": row.episode,
        "who": who,
        "comment": comment,
    }
    event = make_event("watchstep.alert.acknowledged", base_url, (run.project, run.run), now, data)
    add_event(session, run.id, event, now)
    for group in _groups(session, row):
        if not group.refresh:
            mute(session, row, group.receiver, ("acknowledged", who), now)


def withdraw(session: Session, row: AlertInstanceRow) -> None:
    """Take an acknowledgement back: the alert is repeated again. One that has none stays as it is."""
    if not row.acknowledged_by:
        return
    row.acknowledged_by, row.acknowledged_ns, row.acknowledgement = "", None, ""
    now = read_clock(session)
    for group in _groups(session, row):
        group.due_ns = now  # it finds by itself when it is to repeat


def _groups(session: Session, row: AlertInstanceRow) -> list[AlertGroup]:
    return list(
        session.execute(
            select(AlertGroup)
            .join(GroupMember, GroupMember.group_id == AlertGroup.id)
            .where(GroupMember.instance_id == row.id)
            .order_by(AlertGroup.key)
            .with_for_update()
        ).scalars()
    )
