"""Groups of alerts: which receivers an alert reaches, and when each of its groups is flushed next.

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
class Found:
    """Whom an alert reaches, and names in its rule config that nobody is known for."""

    routes: tuple[Route, ...]
    unknown: tuple[str, ...]


def find_routes(
    service: Service, session: Session, project: str, labels: Mapping[str, str], notify: Sequence[str]
) -> Found:
    """Whom an alert reaches. Where nothing is configured, that is nobody."""
    routes = directory.routes_of(service, session, project, labels, notify)
    if not notify:
        return Found(routes, ())
    receivers = directory.known_receivers(service, session, project)
    return Found(routes, tuple(name for name in dict.fromkeys(notify) if name not in receivers))


@dataclass(frozen=True)
class Named:
    """The run whose alerts changed."""

    run_id: int
    project: str
    run: str


@dataclass(frozen=True)
class _Entry:
    """A way of one alert to one receiver."""

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
    named: Named,
    changed: Iterable[AlertInstanceRow],
    began: Container[int],
    now_ns: int,
) -> None:
    """Have the groups of alerts looked at that began to fire, or ended, or are known on a further attempt.

    Groups are taken in the order of their keys, so that two evaluations never wait for each other.

    Args:
        service: the service.
        session: the transaction.
        named: whose alerts.
        changed: of which something is new.
        began: ids of those that began to fire, whether or not they still do.
        now_ns: the database's time.
    """
    rows = {row.id: row for row in changed}
    if not rows:
        return
    entries = [
        entry
        for row in rows.values()
        if _is_told(row, began)
        for entry in _entries(service, session, named, row, now_ns)
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
        group = _locked(session, named, key, entered)
        if group is None:
            continue  # it held none of them any more
        for entry in entered:
            _adopt(group, entry.route)
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


def _locked(session: Session, named: Named, key: str, entered: list[_Entry]) -> AlertGroup | None:
    """A group, made where something enters it; one that was empty may be purged between two statements."""
    while True:
        if entered:
            _make(session, named, key, entered[0])
        group = session.execute(
            select(AlertGroup).filter_by(project=named.project, key=key).with_for_update()
        ).scalar_one_or_none()
        if group is not None or not entered:
            return group


def _escalates(session: Session, group: AlertGroup, entered: list[_Entry], began: Container[int]) -> bool:
    """Whether an alert begins to fire that is more severe than all that its receiver was told to fire."""
    new = [entry.row.severity for entry in entered if entry.row.id in began]
    if not new or not group.open:
        return False
    told = session.execute(
        select(AlertInstanceRow.severity)
        .join(GroupMember, GroupMember.instance_id == AlertInstanceRow.id)
        .where(GroupMember.group_id == group.id, GroupMember.notified_phase == "firing")
    ).scalars()
    return max(map(SEVERITIES.index, new)) > max(map(SEVERITIES.index, told), default=-1)


def wake(group: AlertGroup, now_ns: int, *, urgent: bool = False) -> None:
    """Have a group looked at: a new one, or one with a more severe alert, when it has gathered; one that was told after its interval."""
    waits = group.open and not urgent
    at = max(now_ns, group.notified_ns + group.interval_ns) if waits else now_ns + group.wait_ns
    group.due_ns = at if group.due_ns is None else min(group.due_ns, at)


def _is_told(row: AlertInstanceRow, began: Container[int]) -> bool:
    """It fires, or did within this evaluation and is over: that, too, is told."""
    fired = row.phase == "firing" or row.id in began
    return fired and not row.is_hidden


def _entries(
    service: Service, session: Session, named: Named, row: AlertInstanceRow, now_ns: int
) -> list[_Entry]:
    labels = labels_of(row, named.project, named.run)
    reached = find_routes(service, session, named.project, labels, row.receivers)
    for receiver in reached.unknown:
        mute(session, row, receiver, ("unknown", ""), now_ns)
    return [_Entry(route, row, route.group_labels(labels)) for route in reached.routes]


def _make(session: Session, named: Named, key: str, entry: _Entry) -> None:
    values = {
        "project": named.project,
        "key": key,
        "run_id": named.run_id if "run" in entry.labels else None,
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


def _adopt(group: AlertGroup, route: Route) -> None:
    """Take over what the tree says now."""
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
