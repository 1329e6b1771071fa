"""Membership of alerts in groups: the receivers of an alert, and when each of its groups is flushed next.

Receivers follow from the project's routing tree and from the rule config.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep_rules.rule import SEVERITIES
from watchstep_services.channels.routing import Route
from watchstep_services.core.settings import nanoseconds
from watchstep_services.db.engine import insert_missing
from watchstep_services.db.models import AlertGroup, AlertInstanceRow, GroupMember
from watchstep_services.notify import directory
from watchstep_services.notify.silences import labels_of, mute
from watchstep_services.service.context import Service


@dataclass(frozen=True)
class AlertRoutes:
    """The routes of an alert, and receivers in its rule config that do not exist."""

    routes: tuple[Route, ...]
    unknown: tuple[str, ...]


def find_routes(
    service: Service, session: Session, project: str, labels: Mapping[str, str], notify: Sequence[str]
) -> AlertRoutes:
    """The routes of an alert; there are none if nothing is configured."""
    routes = directory.routes_of(service, session, project, labels, notify)
    if not notify:
        return AlertRoutes(routes, ())
    receivers = directory.known_receivers(service, session, project)
    return AlertRoutes(routes, tuple(name for name in dict.fromkeys(notify) if name not in receivers))


@dataclass(frozen=True)
class RunReference:
    """The run with changed alerts."""

    run_id: int
    project: str
    run: str


@dataclass(frozen=True)
class _Entry:
    """One alert on one route."""

    route: Route
    row: AlertInstanceRow
    labels: dict[str, str]

    @property
    def key(self) -> str:
        named = [self.route.receiver, self.route.place, sorted(self.labels.items())]
        return hashlib.sha256(json.dumps(named, separators=(",", ":")).encode()).hexdigest()


def regroup(
    service: Service,
    session: Session,
    run: RunReference,
    changed: Iterable[AlertInstanceRow],
    began: Container[int],
    now_ns: int,
) -> None:
    """Schedule the groups of alerts that began to fire, ended, or continue on a further attempt.

    Groups are locked in the order of their keys, so that two evaluations cannot deadlock.

    Args:
        service: the service.
        session: the transaction.
        run: the run of the alerts.
        changed: the changed alerts.
        began: ids of alerts that began to fire, whether or not they still do.
        now_ns: the database's time.
    """
    rows = {row.id: row for row in changed}
    if not rows:
        return
    entries = [
        entry
        for row in rows.values()
        if _is_notified(row, began)
        for entry in _entries(service, session, run, row, now_ns)
    ]
    members: dict[str, list[_Entry]] = {}
    for entry in entries:
        members.setdefault(entry.key, []).append(entry)
    keys = session.execute(
        select(AlertGroup.key)
        .join(GroupMember, GroupMember.group_id == AlertGroup.id)
        .where(GroupMember.instance_id.in_(rows))
    ).scalars()
    for key in sorted({*keys, *members}):
        entered = members.get(key, [])
        group = _locked(session, run, key, entered)
        if group is None:
            continue  # it was purged, and contained none of the alerts any more
        for entry in entered:
            _update_times(group, entry.route)
            insert_missing(
                session,
                GroupMember,
                {
                    "group_id": group.id,
                    "instance_id": entry.row.id,
                    "notified_episode": 0,
                    "notified_phase": "",
                },
            )
        wake(group, now_ns, urgent=_escalates(session, group, entered, began))


def _locked(session: Session, run: RunReference, key: str, entered: list[_Entry]) -> AlertGroup | None:
    """Lock a group, created if entries are added; an empty group may be purged between two statements."""
    while True:
        if entered:
            _make(session, run, key, entered[0])
        group = session.execute(
            select(AlertGroup).filter_by(project=run.project, key=key).with_for_update()
        ).scalar_one_or_none()
        if group is not None or not entered:
            return group


def _escalates(session: Session, group: AlertGroup, entered: list[_Entry], began: Container[int]) -> bool:
    """Whether an alert begins to fire that is more severe than all firing alerts that were reported to the receiver."""
    new = [entry.row.severity for entry in entered if entry.row.id in began]
    if not new or not group.open:
        return False
    reported = session.execute(
        select(AlertInstanceRow.severity)
        .join(GroupMember, GroupMember.instance_id == AlertInstanceRow.id)
        .where(GroupMember.group_id == group.id, GroupMember.notified_phase == "firing")
    ).scalars()
    return max(map(SEVERITIES.index, new)) > max(map(SEVERITIES.index, reported), default=-1)


def wake(group: AlertGroup, now_ns: int, *, urgent: bool = False) -> None:
    """Make a group due: a new one, or one with a more severe alert, after its group wait; any other after its interval."""
    waits = group.open and not urgent
    at = max(now_ns, group.notified_ns + group.interval_ns) if waits else now_ns + group.wait_ns
    group.due_ns = at if group.due_ns is None else min(group.due_ns, at)


def _is_notified(row: AlertInstanceRow, began: Container[int]) -> bool:
    """Whether it fires, or fired within this evaluation and is resolved, which is reported, too."""
    fired = row.phase == "firing" or row.id in began
    return fired and not row.is_hidden


def _entries(
    service: Service, session: Session, run: RunReference, row: AlertInstanceRow, now_ns: int
) -> list[_Entry]:
    labels = labels_of(row, run.project, run.run)
    alert_routes = find_routes(service, session, run.project, labels, row.receivers)
    for receiver in alert_routes.unknown:
        mute(session, row, receiver, ("unknown", ""), now_ns)
    return [_Entry(route, row, route.group_labels(labels)) for route in alert_routes.routes]


def _make(session: Session, run: RunReference, key: str, entry: _Entry) -> None:
    values = {
        "project": run.project,
        "key": key,
        "run_id": run.run_id if "run" in entry.labels else None,
        "receiver": entry.route.receiver,
        "labels": entry.labels,
        "open": False,
        "generation": 0,
        "repeats": 0,
        "notified_ns": 0,
        "due_ns": None,
        **_times(entry.route),
    }
    insert_missing(session, AlertGroup, values)


def _update_times(group: AlertGroup, route: Route) -> None:
    """Copy the times of the current routing tree."""
    for name, value in _times(route).items():
        setattr(group, name, value)


def _times(route: Route) -> dict[str, int | bool]:
    return {
        "wait_ns": nanoseconds(route.group_wait),
        "interval_ns": nanoseconds(route.group_interval),
        "repeat_ns": nanoseconds(route.repeat_interval),
        "send_resolved": route.send_resolved,
        "refresh": route.refresh,
    }
