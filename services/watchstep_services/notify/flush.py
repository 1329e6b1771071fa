"""Flush a due group: its receiver's unreported alerts become one notification in the outbox, which is then delivered.

A flush is one short transaction that begins by claiming the group. A second worker finds that the group is no longer due, and a
process that dies meanwhile has sent nothing and lost nothing.
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
from watchstep_rules.engine.incident import Explanation, IncidentSummary
from watchstep_rules.rule import SEVERITIES
from watchstep_services.channels import receiver_file
from watchstep_services.channels.delivery import DeliveryContext, Message, MessagePicture
from watchstep_services.channels.notification import Notification, NotifiedAlert, Status, as_cloud_event
from watchstep_services.channels.receiver import Receiver
from watchstep_services.channels.wording import Templates, render
from watchstep_services.core.due_action import AttemptResult, DueAction
from watchstep_services.core.egress import AddressRefusedError
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.clock import now_ns, read_clock
from watchstep_services.db.engine import is_of_all
from watchstep_services.db.models import AlertGroup, AlertInstanceRow, GroupMember, Incident, RunRow
from watchstep_services.db.records import add_action
from watchstep_services.notify import pictures, silences
from watchstep_services.notify.directory import egress_policy_of, find_receiver, open_secrets
from watchstep_services.notify.silences import labels_of, mute
from watchstep_services.runs.lifecycle import ENDED
from watchstep_services.service.context import Service


def alert_of(
    service: Service,
    row: AlertInstanceRow,
    run: RunRow,
    status: Status,
    now_ns: int,
    incident: IncidentSummary | None = None,
) -> NotifiedAlert:
    """An alert for a notification. ``resolved_ns`` is also set if it is reported as firing and has resolved since."""
    ended = row.resolved_ns
    if status == "resolved" and ended is None:
        ended = now_ns  # it fires again, which is not reported yet
    return NotifiedAlert(
        name=row.name,
        rule=row.rule,
        severity=row.severity,
        phase=status,
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
        url=service.links.alert(run.project, run.run, row.fingerprint),
    )


def notification_of(
    service: Service, group: AlertGroup, runs: Sequence[RunRow], alerts: Sequence[NotifiedAlert], now_ns: int
) -> Notification:
    """Build a notification, firing alerts first; its id is the group's number and generation."""
    alone = runs[0].run if len(runs) == 1 else ""
    return Notification(
        id=f"{group.id}-{group.generation}-{group.key[:16]}",
        project=group.project,
        run=alone,
        run_url=service.links.run(group.project, alone) if alone else service.links.project(group.project),
        service_url=service.base_url,
        status="firing" if any(alert.phase == "firing" for alert in alerts) else "resolved",
        group_key=group.key,
        group_labels=group.labels,
        alerts=tuple(alerts),
        at_ns=now_ns,
        repeat=group.repeats,
    )


_RETRY_NS = 60 * NANOSECONDS
_HEALTH = "notifications"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _MemberAlert:
    """An alert of the group, and what its receiver was notified of."""

    member: GroupMember
    row: AlertInstanceRow
    run: RunRow
    silence: silences.Active | None
    incident: IncidentSummary | None = None
    joins: bool = False
    """The receiver was notified of equally severe alerts of its incident, so the alert is part of the next notification."""

    @property
    def fires(self) -> bool:
        """Whether it fires and is not hidden."""
        return self.row.phase == "firing" and not self.row.is_hidden

    @property
    def is_news(self) -> bool:
        """Whether it began to fire and was not reported; it may be resolved by now."""
        return self.is_unreported and not self.joins

    @property
    def is_unreported(self) -> bool:
        return not self.row.is_hidden and self.member.notified_episode != self.row.episode

    @property
    def is_joined(self) -> bool:
        """Whether it fires and is part of the next notification without causing one."""
        return self.is_unreported and self.joins and self.fires and self.run.state not in ENDED

    @property
    def is_cause(self) -> bool:
        """Whether it is the likeliest cause of its incident."""
        return self.incident is not None and self.incident.cause == self.row.name

    @property
    def is_over(self) -> bool:
        """Whether it is resolved, which was not reported."""
        return self.member.notified_phase == "firing" and not self.fires and not self.is_news

    @property
    def lasts(self) -> bool:
        """Whether it fires and was reported; alerts of an ended run are not repeated."""
        is_notified = (
            self.member.notified_phase == "firing" and self.member.notified_episode == self.row.episode
        )
        return self.fires and is_notified and self.run.state not in ENDED

    @property
    def matters(self) -> bool:
        """Whether there is something to report, now or again."""
        return self.is_news or self.is_over or self.lasts or self.is_joined


def due_groups(service: Service, limit: int = 100) -> list[int]:
    """Ids of due groups, longest due first."""
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
    """Flush all due groups; return the ids of new actions."""
    actions = [_flushed(service, group_id) for group_id in due_groups(service)]
    return [action for action in actions if action is not None]


def _flushed(service: Service, group_id: int) -> int | None:
    try:
        return flush(service, group_id)
    except Exception as error:
        if is_of_all(error):
            raise
        # An internal error with one group must not delay other groups or stops.
        _log.exception("group %d of alerts: cannot be flushed; it is tried again in a minute", group_id)
        metrics.SWEEP_FAULTS.labels("group").inc()
        try:
            _put_off(service, group_id, type(error).__name__)
        except SQLAlchemyError as database_error:
            _log.warning("group %d of alerts: the next sweep tries it again: %s", group_id, database_error)
        return None


def _put_off(service: Service, group_id: int, fault: str) -> None:
    """Postpone a group that cannot be flushed, and report it in the health of the runs of its alerts."""
    with service.database.write() as session:
        session.execute(
            update(AlertGroup)
            .where(AlertGroup.id == _free(group_id))
            .values(due_ns=now_ns() + _RETRY_NS)
            .execution_options(synchronize_session=False)
        )
        run_ids = (
            select(AlertInstanceRow.run_id)
            .join(GroupMember, GroupMember.instance_id == AlertInstanceRow.id)
            .where(GroupMember.group_id == group_id)
        )
        problem = (
            f"alerts: notifications failed with an internal error ({fault}); they are tried again each minute"
        )
        for run in _free_runs(session, run_ids):
            run.health = {**run.health, _HEALTH: problem}


def _free_runs(session: Session, ids: Any) -> list[RunRow]:
    """Lock the unlocked ones of some runs. Evaluations lock their run before its groups, so waiting here could deadlock."""
    chosen = select(RunRow).where(RunRow.id.in_(ids)).order_by(RunRow.id).with_for_update(skip_locked=True)
    return list(session.execute(chosen.execution_options(populate_existing=True)).scalars())


def _free(group_id: int) -> Any:
    """The group's id, if it is not locked: a hanging transaction on one group must not block the others."""
    return (
        select(AlertGroup.id)
        .where(AlertGroup.id == group_id)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )


def flush(service: Service, group_id: int) -> int | None:
    """Flush one group if it is due.

    Returns:
        The id of the action that notifies its receiver; None if there is nothing to report.
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
        member_alerts = _members_of(session, group, now)
        news = _content_of(group, member_alerts, now)
        ended = [
            member_alert
            for member_alert in member_alerts
            if member_alert.silence is None and member_alert.is_over
        ]
        action = _notify(service, session, group, news, now) if news else None
        for member_alert in ended:  # reported, unless its route does not send resolved alerts
            member_alert.member.notified_phase = "resolved"
        _mute(session, group, member_alerts, now)
        _schedule(group, member_alerts, now)
        _remove_settled(session, group, member_alerts)
        for run in _free_runs(
            session,
            {member_alert.run.id for member_alert in member_alerts if _HEALTH in member_alert.run.health},
        ):
            run.health = {name: problem for name, problem in run.health.items() if name != _HEALTH}
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
    member_alerts = [
        _MemberAlert(
            member,
            row,
            run,
            silences.covering(active_silences, labels_of(row, run.project, run.run)),
            None if summary is None else IncidentSummary.model_validate(summary),
        )
        for member, row, run, summary in rows
    ]
    return member_alerts if group.refresh else _joined(member_alerts)


def _joined(member_alerts: Sequence[_MemberAlert]) -> list[_MemberAlert]:
    """Mark alerts of reported incidents; an alert more severe than all reported ones of its incident is news."""
    severities: dict[str, int] = {}
    for member_alert in member_alerts:
        if (
            member_alert.incident is not None
            and member_alert.member.notified_phase == "firing"
            and not member_alert.is_unreported
        ):
            severity = SEVERITIES.index(member_alert.row.severity)
            severities[member_alert.incident.id] = max(severities.get(member_alert.incident.id, -1), severity)
    return [
        replace(member_alert, joins=True)
        if member_alert.incident is not None
        and SEVERITIES.index(member_alert.row.severity) <= severities.get(member_alert.incident.id, -1)
        else member_alert
        for member_alert in member_alerts
    ]


@dataclass(frozen=True)
class _NotificationContent:
    """The alerts of a notification: firing ones and resolved ones."""

    firing: Sequence[_MemberAlert]
    over: Sequence[_MemberAlert]
    has_news: bool

    def __bool__(self) -> bool:
        return bool(self.firing or self.over)


def _content_of(group: AlertGroup, member_alerts: Sequence[_MemberAlert], now: int) -> _NotificationContent:
    unsilenced = [member_alert for member_alert in member_alerts if member_alert.silence is None]
    news = [member_alert for member_alert in unsilenced if member_alert.is_news]
    lasting = [member_alert for member_alert in unsilenced if member_alert.lasts or member_alert.is_joined]
    over = [member_alert for member_alert in unsilenced if member_alert.is_over]
    if news or (over and group.send_resolved):
        return _NotificationContent([*news, *lasting], over if group.send_resolved else [], has_news=True)
    to_repeat = [
        member_alert
        for member_alert in lasting
        if group.refresh or not (member_alert.row.acknowledged_by or member_alert.run.state == "lost")
    ]
    if to_repeat and now >= group.notified_ns + group.repeat_ns:
        return _NotificationContent(lasting, [], has_news=False)
    return _NotificationContent([], [], has_news=False)


def _notify(
    service: Service, session: Session, group: AlertGroup, news: _NotificationContent, now: int
) -> int | None:
    group.generation += 1
    group.repeats = 0 if news.has_news else group.repeats + 1
    group.notified_ns = now
    firing = sorted(news.firing, key=lambda member_alert: not member_alert.is_cause)
    alerts = [
        alert_of(service, member_alert.row, member_alert.run, "firing", now, member_alert.incident)
        for member_alert in firing
    ]
    alerts += [
        alert_of(service, member_alert.row, member_alert.run, "resolved", now, member_alert.incident)
        for member_alert in news.over
    ]
    runs = {member_alert.run.id: member_alert.run for member_alert in (*news.firing, *news.over)}
    notification = notification_of(service, group, list(runs.values()), alerts, now)
    first = (*news.firing, *news.over)[0]
    payload: dict[str, Any] = {"receiver": group.receiver, "notification": notification.as_data()}
    cause = {"event_id": first.row.event_id, "at_ns": now, "payload": payload}
    for member_alert in news.firing:
        member_alert.member.notified_episode, member_alert.member.notified_phase = (
            member_alert.row.episode,
            "firing",
        )
    return add_action(session, first.run.id, NOTIFY, f"{NOTIFY}:{group.id}:{group.generation}", cause)


def _mute(session: Session, group: AlertGroup, member_alerts: Sequence[_MemberAlert], now: int) -> None:
    for member_alert in member_alerts:
        if member_alert.silence is not None and member_alert.matters:
            mute(
                session,
                member_alert.row,
                group.receiver,
                ("silenced", f"silence {member_alert.silence.id}"),
                now,
            )
        elif member_alert.is_joined and member_alert.incident is not None:
            mute(session, member_alert.row, group.receiver, ("incident", member_alert.incident.id), now)


def _schedule(group: AlertGroup, member_alerts: Sequence[_MemberAlert], now: int) -> None:
    group.open = any(
        member_alert.lasts
        or member_alert.is_joined
        or (member_alert.silence is None and member_alert.is_over)
        for member_alert in member_alerts
    )
    moments = []
    for member_alert in member_alerts:
        if member_alert.silence is not None:
            if member_alert.matters:
                moments.append(member_alert.silence.ends_ns)
        elif member_alert.is_over:
            # It resolved before it was reported: its firing is reported first, and this after the interval.
            moments.append(group.notified_ns + group.interval_ns)
        elif (member_alert.lasts or member_alert.is_joined) and (
            group.refresh or not member_alert.row.acknowledged_by
        ):
            moments.append((now if member_alert.run.state == "lost" else group.notified_ns) + group.repeat_ns)
    group.due_ns = max(now, min(moments)) if moments else None


def _remove_settled(session: Session, group: AlertGroup, member_alerts: Sequence[_MemberAlert]) -> None:
    """Remove alerts with a reported end, so that a group over many runs does not grow."""
    settled = [
        member_alert.row.id
        for member_alert in member_alerts
        if not member_alert.fires
        and not member_alert.is_news
        and member_alert.member.notified_phase != "firing"
    ]
    if settled:
        session.flush()
        session.execute(
            delete(GroupMember)
            .where(GroupMember.group_id == group.id, GroupMember.instance_id.in_(settled))
            .execution_options(synchronize_session=False)
        )


NOTIFY = "notify"
"""Kind of the action; its payload is ``{"receiver": name, "notification": Notification.as_data()}``."""


def try_notify(service: Service, due: DueAction) -> AttemptResult:
    """Send a notification once. The receiver is looked up in the project of the action's run at this time."""
    notification = Notification.from_data(due.payload["notification"])
    name = str(due.payload["receiver"])
    try:
        with service.database.read() as session:
            project = session.get_one(RunRow, due.run_id).project
            receiver = find_receiver(service, session, project, name)
            delivery = delivery_context(service, session, project, receiver)
    except NotFoundError as error:
        return AttemptResult("failed", f"{error.what}; it existed when the alert was routed")
    picture = pictures.picture_for(service, receiver, notification, delivery.now_ns)
    return deliver(receiver, notification, delivery, picture)


def delivery_context(service: Service, session: Session, project: str, receiver: Receiver) -> DeliveryContext:
    """The egress policy, time limit and decrypted secrets for a delivery.

    Raises:
        ConfigError: a secret cannot be read or decrypted.
    """
    return DeliveryContext(
        egress_policy=egress_policy_of(service.settings, project),
        seconds=service.settings.webhook_seconds,
        now_ns=read_clock(session),
        secrets=open_secrets(service, session, project, receiver),
    )


def deliver(
    receiver: Receiver,
    notification: Notification,
    delivery: DeliveryContext,
    picture: MessagePicture | None = None,
) -> AttemptResult:
    """Render a notification with the receiver's templates and send it, once.

    Raises:
        WatchstepError: an error that the receiver's owner can correct.
    """
    try:
        return receiver_file.send(receiver, message_of(notification, receiver.templates, picture), delivery)
    except AddressRefusedError as error:
        return AttemptResult("failed", f"{error.what} ({error.hint})")


def message_of(
    notification: Notification, templates: Templates, picture: MessagePicture | None = None
) -> Message:
    """Render a notification as a message."""
    title, text = render(notification, templates)
    return Message(
        notification=notification,
        title=title,
        text=text,
        has_custom_text=templates != Templates(),
        event=as_cloud_event(notification, title, text),
        picture=picture,
    )
