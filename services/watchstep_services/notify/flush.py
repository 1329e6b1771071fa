"""Flush a group that is due: what its receiver does not know yet becomes one notification in the outbox, and is delivered.

All of it is one short transaction that begins by taking the group: of two workers one finds that it is no longer due, and a
process that dies in between has notified nobody and lost nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep_rules.engine.explanation import Explanation
from watchstep_rules.engine.incident import IncidentSummary
from watchstep_rules.rule import SEVERITIES
from watchstep_services.channels import kinds
from watchstep_services.channels.delivery import DeliveryContext, Message
from watchstep_services.channels.notification import Notification, NotifiedAlert, Status, as_cloud_event
from watchstep_services.channels.receiver import Receiver
from watchstep_services.channels.wording import Templates, word
from watchstep_services.core.due_action import AttemptResult, DueAction
from watchstep_services.core.egress import AddressRefusedError
from watchstep_services.core.events import run_url
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.clock import now_ns, read_clock
from watchstep_services.db.limits import is_of_all
from watchstep_services.db.models import AlertGroup, AlertInstanceRow, GroupMember, Incident, RunRow
from watchstep_services.db.records import add_action
from watchstep_services.notify import silences
from watchstep_services.notify.directory import find_receiver, open_secrets, reach_of
from watchstep_services.notify.silences import labels_of, mute
from watchstep_services.runs.lifecycle import ENDED
from watchstep_services.service.context import Service


def alert_of(
    row: AlertInstanceRow, run: RunRow, said: Status, now_ns: int, incident: IncidentSummary | None = None
) -> NotifiedAlert:
    """An alert as it stands; of one that is told to fire and is over by now, ``resolved_ns`` says since when."""
    ended = row.resolved_ns
    if said == "resolved" and ended is None:
        ended = now_ns  # it fires again, and of that nobody is told
    return NotifiedAlert(
        name=row.name,
        rule=row.rule,
        severity=row.severity,
        phase=said,
        attempt=row.attempt,
        step=row.step,
        labels=labels_of(row, run.project, run.run),
        message=row.message,
        explanation=Explanation.model_validate(row.explanation) if row.explanation else None,
        fingerprint=row.fingerprint,
        since_ns=row.since_ns,
        fired_ns=row.fired_ns,
        resolved_ns=ended,
        event_id=row.event_id,
        acknowledged_by=row.acknowledged_by,
        incident=incident,
    )


def notification_of(
    base_url: str, group: AlertGroup, runs: Sequence[RunRow], alerts: Sequence[NotifiedAlert], now_ns: int
) -> Notification:
    """A notification of these alerts, those that fire first; its id is the group's number and generation."""
    alone = runs[0].run if len(runs) == 1 else ""
    return Notification(
        id=f"{group.id}-{group.generation}-{group.key[:16]}",
        project=group.project,
        run=alone,
        run_url=run_url(base_url, group.project, alone)
        if alone
        else f"{base_url}/v1/projects/{group.project}",
        status="firing" if any(alert.phase == "firing" for alert in alerts) else "resolved",
        group_key=group.key,
        group_labels=group.labels,
        alerts=tuple(alerts),
        at_ns=now_ns,
        repeat=group.repeats,
    )


_AGAIN_NS = 60 * NANOSECONDS
_HEALTH = "notifications"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _MemberAlert:
    """An alert of the group as it is now, and what its receiver was notified of."""

    member: GroupMember
    row: AlertInstanceRow
    run: RunRow
    silence: silences.Active | None
    incident: IncidentSummary | None = None
    joins: bool = False
    """Its incident was told of in this group by alerts that are as severe: it is told with the next notification."""

    @property
    def fires(self) -> bool:
        """Whether it fires and is not hidden."""
        return self.row.phase == "firing" and not self.row.is_hidden

    @property
    def is_news(self) -> bool:
        """It began to fire and was not notified; it may be resolved by now."""
        return self.is_unreported and not self.joins

    @property
    def is_unreported(self) -> bool:
        return not self.row.is_hidden and self.member.notified_episode != self.row.episode

    @property
    def is_joined(self) -> bool:
        """It fires and is told with the next notification, of which it is no reason."""
        return self.is_unreported and self.joins and self.fires and self.run.state not in ENDED

    @property
    def is_cause(self) -> bool:
        """It is the likeliest cause of its incident."""
        return self.incident is not None and self.incident.cause == self.row.name

    @property
    def is_over(self) -> bool:
        """It is resolved and that was not notified."""
        return self.member.notified_phase == "firing" and not self.fires and not self.is_news

    @property
    def lasts(self) -> bool:
        """It fires, and that is known; nothing comes of a run that has ended."""
        is_notified = (
            self.member.notified_phase == "firing" and self.member.notified_episode == self.row.episode
        )
        return self.fires and is_notified and self.run.state not in ENDED

    @property
    def matters(self) -> bool:
        """There is something to notify, now or again."""
        return self.is_news or self.is_over or self.lasts or self.is_joined


def due_groups(service: Service, limit: int = 100) -> list[int]:
    """Ids of groups that are due, the longest due first."""
    with service.database.read() as session:
        return list(
            session.execute(
                select(AlertGroup.id)
                .where(AlertGroup.due_ns <= now_ns())
                .order_by(AlertGroup.due_ns)
                .limit(limit)
            ).scalars()
        )


def flush_due(service: Service) -> list[int]:
    """Flush all groups that are due; returns the ids of new actions."""
    actions = [_flushed(service, group_id) for group_id in due_groups(service)]
    return [action for action in actions if action is not None]


def _flushed(service: Service, group_id: int) -> int | None:
    try:
        return flush(service, group_id)
    except Exception as error:
        if is_of_all(error):
            raise
        # A fault of ours with this group: no other waits for it, nor does a stop.
        _log.exception("group %d of alerts: cannot be looked at; it is tried again in a minute", group_id)
        metrics.SWEEP_FAULTS.labels("group").inc()
        try:
            _put_off(service, group_id, type(error).__name__)
        except SQLAlchemyError as another:
            _log.warning("group %d of alerts: the next sweep tries it again: %s", group_id, another)
        return None


def _put_off(service: Service, group_id: int, fault: str) -> None:
    """Postpone a group that cannot be flushed, and record that in the health of the runs of its alerts."""
    with service.database.write() as session:
        session.execute(
            update(AlertGroup)
            .where(AlertGroup.id == _free(group_id))
            .values(due_ns=now_ns() + _AGAIN_NS)
            .execution_options(synchronize_session=False)
        )
        run_ids = (
            select(AlertInstanceRow.run_id)
            .join(GroupMember, GroupMember.instance_id == AlertInstanceRow.id)
            .where(GroupMember.group_id == group_id)
        )
        said = f"alerts: the service failed to tell of them ({fault}); it is tried again each minute"
        for run in _free_runs(session, run_ids):
            run.health = {**run.health, _HEALTH: said}


def _free_runs(session: Session, ids: Any) -> list[RunRow]:
    """Runs that nobody is writing, locked: an evaluation takes its run first and then its groups, and must not wait for us."""
    chosen = select(RunRow).where(RunRow.id.in_(ids)).order_by(RunRow.id).with_for_update(skip_locked=True)
    return list(session.execute(chosen.execution_options(populate_existing=True)).scalars())


def _free(group_id: int) -> Any:
    """The group's id, if nobody is writing it: who hangs with one group keeps nobody from the others."""
    return (
        select(AlertGroup.id)
        .where(AlertGroup.id == group_id)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )


def flush(service: Service, group_id: int) -> int | None:
    """Flush one group if it is due.

    Returns:
        The id of the action that tells its receiver; None where there is nothing to tell.
    """
    with service.database.write() as session:
        taken = session.execute(
            update(AlertGroup)
            .where(AlertGroup.id == _free(group_id), AlertGroup.due_ns <= now_ns())
            .values(due_ns=None)
            .returning(AlertGroup.id)
            .execution_options(synchronize_session=False)
        ).first()
        if taken is None:
            return None
        group = session.get_one(AlertGroup, group_id)
        now = read_clock(session)
        seen = _members_of(session, group, now)
        news = _content_of(group, seen, now)
        ended = [seen_alert for seen_alert in seen if seen_alert.silence is None and seen_alert.is_over]
        action = _notify(service, session, group, news, now) if news else None
        for seen_alert in ended:  # told, or not to be told by its route
            seen_alert.member.notified_phase = "resolved"
        _mute(session, group, seen, now)
        _schedule(group, seen, now)
        _remove_settled(session, group, seen)
        for run in _free_runs(
            session, {seen_alert.run.id for seen_alert in seen if _HEALTH in seen_alert.run.health}
        ):
            run.health = {name: said for name, said in run.health.items() if name != _HEALTH}
        return action


def _members_of(session: Session, group: AlertGroup, now: int) -> list[_MemberAlert]:
    rows = session.execute(
        select(GroupMember, AlertInstanceRow, RunRow, Incident.summary)
        .join(AlertInstanceRow, AlertInstanceRow.id == GroupMember.instance_id)
        .join(RunRow, RunRow.id == AlertInstanceRow.run_id)
        .outerjoin(
            Incident,
            (Incident.run_id == AlertInstanceRow.run_id) & (Incident.key == AlertInstanceRow.incident),
        )
        .where(GroupMember.group_id == group.id)
        .order_by(AlertInstanceRow.fired_ns, AlertInstanceRow.id)
    ).all()
    active_silences = silences.active(session, group.project, now)
    seen = [
        _MemberAlert(
            member,
            row,
            run,
            silences.covering(active_silences, labels_of(row, run.project, run.run)),
            None if summary is None else IncidentSummary.model_validate(summary),
        )
        for member, row, run, summary in rows
    ]
    return seen if group.refresh else _joined(seen)


def _joined(seen: Sequence[_MemberAlert]) -> list[_MemberAlert]:
    """Mark alerts of incidents that were told of; one that is more severe than all that was told of its incident is news."""
    severities: dict[str, int] = {}
    for seen_alert in seen:
        if (
            seen_alert.incident is not None
            and seen_alert.member.notified_phase == "firing"
            and not seen_alert.is_unreported
        ):
            severity = SEVERITIES.index(seen_alert.row.severity)
            severities[seen_alert.incident.id] = max(severities.get(seen_alert.incident.id, -1), severity)
    return [
        replace(seen_alert, joins=True)
        if seen_alert.incident is not None
        and SEVERITIES.index(seen_alert.row.severity) <= severities.get(seen_alert.incident.id, -1)
        else seen_alert
        for seen_alert in seen
    ]


@dataclass(frozen=True)
class _NotificationContent:
    """The alerts of a notification: those that fire, and those that are resolved."""

    firing: Sequence[_MemberAlert]
    over: Sequence[_MemberAlert]
    has_news: bool

    def __bool__(self) -> bool:
        return bool(self.firing or self.over)


def _content_of(group: AlertGroup, seen: Sequence[_MemberAlert], now: int) -> _NotificationContent:
    heard = [seen_alert for seen_alert in seen if seen_alert.silence is None]
    news = [seen_alert for seen_alert in heard if seen_alert.is_news]
    lasting = [seen_alert for seen_alert in heard if seen_alert.lasts or seen_alert.is_joined]
    over = [seen_alert for seen_alert in heard if seen_alert.is_over]
    if news or (over and group.send_resolved):
        return _NotificationContent([*news, *lasting], over if group.send_resolved else [], has_news=True)
    again = [
        seen_alert
        for seen_alert in lasting
        if group.refresh or not (seen_alert.row.acknowledged_by or seen_alert.run.state == "lost")
    ]
    if again and now >= group.notified_ns + group.repeat_ns:
        return _NotificationContent(lasting, [], has_news=False)
    return _NotificationContent([], [], has_news=False)


def _notify(
    service: Service, session: Session, group: AlertGroup, news: _NotificationContent, now: int
) -> int | None:
    group.generation += 1
    group.repeats = 0 if news.has_news else group.repeats + 1
    group.notified_ns = now
    firing = sorted(news.firing, key=lambda seen_alert: not seen_alert.is_cause)
    alerts = [
        alert_of(seen_alert.row, seen_alert.run, "firing", now, seen_alert.incident) for seen_alert in firing
    ]
    alerts += [
        alert_of(seen_alert.row, seen_alert.run, "resolved", now, seen_alert.incident)
        for seen_alert in news.over
    ]
    runs = {seen_alert.run.id: seen_alert.run for seen_alert in (*news.firing, *news.over)}
    notification = notification_of(service.base_url, group, list(runs.values()), alerts, now)
    first = (*news.firing, *news.over)[0]
    payload: dict[str, Any] = {"receiver": group.receiver, "notification": notification.as_data()}
    cause = {"event_id": first.row.event_id, "at_ns": now, "payload": payload}
    for seen_alert in news.firing:
        seen_alert.member.notified_episode, seen_alert.member.notified_phase = (
            seen_alert.row.episode,
            "firing",
        )
    return add_action(session, first.run.id, NOTIFY, f"{NOTIFY}:{group.id}:{group.generation}", cause)


def _mute(session: Session, group: AlertGroup, seen: Sequence[_MemberAlert], now: int) -> None:
    for seen_alert in seen:
        if seen_alert.silence is not None and seen_alert.matters:
            mute(
                session, seen_alert.row, group.receiver, ("silenced", f"silence {seen_alert.silence.id}"), now
            )
        elif seen_alert.is_joined and seen_alert.incident is not None:
            mute(session, seen_alert.row, group.receiver, ("incident", seen_alert.incident.id), now)


def _schedule(group: AlertGroup, seen: Sequence[_MemberAlert], now: int) -> None:
    group.open = any(
        seen_alert.lasts or seen_alert.is_joined or (seen_alert.silence is None and seen_alert.is_over)
        for seen_alert in seen
    )
    moments = []
    for seen_alert in seen:
        if seen_alert.silence is not None:
            if seen_alert.matters:
                moments.append(seen_alert.silence.ends_ns)
        elif seen_alert.is_over:
            # It was over before it was told: that it fired is said first, and this after the interval.
            moments.append(group.notified_ns + group.interval_ns)
        elif (seen_alert.lasts or seen_alert.is_joined) and (
            group.refresh or not seen_alert.row.acknowledged_by
        ):
            moments.append((now if seen_alert.run.state == "lost" else group.notified_ns) + group.repeat_ns)
    group.due_ns = max(now, min(moments)) if moments else None


def _remove_settled(session: Session, group: AlertGroup, seen: Sequence[_MemberAlert]) -> None:
    """Remove alerts whose end was notified, so that a group over many runs does not grow."""
    gone = [
        seen_alert.row.id
        for seen_alert in seen
        if not seen_alert.fires and not seen_alert.is_news and seen_alert.member.notified_phase != "firing"
    ]
    if gone:
        session.flush()
        session.execute(
            delete(GroupMember)
            .where(GroupMember.group_id == group.id, GroupMember.instance_id.in_(gone))
            .execution_options(synchronize_session=False)
        )


NOTIFY = "notify"
"""Kind of an action; its payload is ``{"receiver": name, "notification": Notification.as_data()}``."""


def try_notify(service: Service, due: DueAction) -> AttemptResult:
    """Send a notification once. The receiver is looked up in the project of the action's run, as it is now."""
    notification = Notification.from_data(due.payload["notification"])
    name = str(due.payload["receiver"])
    try:
        with service.database.read() as session:
            project = session.get_one(RunRow, due.run_id).project
            receiver = find_receiver(service, session, project, name)
            delivery = outside_of(service, session, project, receiver)
    except NotFoundError as error:
        return AttemptResult("failed", f"{error.what}; it was there when the alert was routed")
    return deliver(receiver, notification, delivery)


def outside_of(service: Service, session: Session, project: str, receiver: Receiver) -> DeliveryContext:
    """The way out for a receiver, with its secrets opened.

    Raises:
        ConfigError: a secret cannot be read or opened.
    """
    return DeliveryContext(
        reach=reach_of(service.settings, project),
        seconds=service.settings.webhook_seconds,
        now_ns=read_clock(session),
        secrets=open_secrets(service, session, project, receiver),
    )


def deliver(receiver: Receiver, notification: Notification, delivery: DeliveryContext) -> AttemptResult:
    """Put a notification into the receiver's words and send it, once.

    Raises:
        WatchstepError: what the receiver's owner can correct.
    """
    try:
        return kinds.send(receiver, message_of(notification, receiver.templates), delivery)
    except AddressRefusedError as error:
        return AttemptResult("failed", f"{error.what} ({error.hint})")


def message_of(notification: Notification, templates: Templates) -> Message:
    """A notification in words."""
    title, text = word(notification, templates)
    return Message(
        notification=notification,
        title=title,
        text=text,
        worded=templates != Templates(),
        event=as_cloud_event(notification, title, text),
    )
