"""Acknowledgements for receivers that have acknowledgements of their own, such as PagerDuty.

When a person acknowledges an alert, its notifications are not repeated, so such a receiver would not get to know. It is notified once
all alerts of a group that fire, and that it was notified of, are acknowledged: the group is one alert there.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import AlertGroup, AlertInstanceRow, GroupMember, RunRow
from watchstep_services.db.records import add_action
from watchstep_services.notify.directory import list_receivers
from watchstep_services.notify.flush import NOTIFY, alert_of, notification_of
from watchstep_services.service.context import Service


def notify_acknowledged(service: Service, session: Session, row: AlertInstanceRow) -> list[int]:
    """Notify the receivers of an alert that a person has just acknowledged.

    Args:
        service: the service.
        session: the transaction of the acknowledgement.
        row: the alert.

    Returns:
        The ids of new actions.
    """
    run = session.get_one(RunRow, row.run_id)
    receivers = {
        receiver.name for receiver in list_receivers(service, session, run.project) if receiver.acknowledges
    }
    if not receivers:
        return []
    groups = session.execute(
        select(AlertGroup)
        .join(GroupMember, GroupMember.group_id == AlertGroup.id)
        .where(
            GroupMember.instance_id == row.id,
            GroupMember.notified_phase == "firing",
            AlertGroup.receiver.in_(receivers),
        )
        .order_by(AlertGroup.key)
    ).scalars()
    actions = [_notify(service, session, group, row) for group in groups]
    return [action for action in actions if action is not None]


def _notify(service: Service, session: Session, group: AlertGroup, row: AlertInstanceRow) -> int | None:
    members = session.execute(
        select(AlertInstanceRow, RunRow)
        .join(GroupMember, GroupMember.instance_id == AlertInstanceRow.id)
        .join(RunRow, RunRow.id == AlertInstanceRow.run_id)
        .where(
            GroupMember.group_id == group.id,
            GroupMember.notified_phase == "firing",
            AlertInstanceRow.phase == "firing",
        )
        .order_by(AlertInstanceRow.fired_ns, AlertInstanceRow.id)
    ).all()
    if not members or not all(member.acknowledged_by for member, _ in members):
        return None
    now = read_clock(session)
    alerts = [alert_of(service, member, run, "firing", now) for member, run in members]
    runs = {run.id: run for _, run in members}
    notification = notification_of(service, group, list(runs.values()), alerts, now)
    # Its own id: with that of the notification before it, a receiver would take it for a duplicate.
    data = {**notification.as_data(), "id": f"{notification.id}-acknowledged-{now}"}
    payload = {"receiver": group.receiver, "notification": data}
    cause = {"event_id": row.event_id, "at_ns": now, "payload": payload}
    return add_action(
        session, row.run_id, NOTIFY, f"{NOTIFY}:{group.id}:{group.generation}:acknowledged:{now}", cause
    )
