"""Silences and acknowledgements, which suppress notifications of known alerts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError
from watchstep_services.channels.notification import alert_labels
from watchstep_services.channels.routing import Matcher, parse_matcher
from watchstep_services.core.events import make_event
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import insert_missing
from watchstep_services.db.models import AlertGroup, AlertInstanceRow, GroupMember, Muted, RunRow, Silence
from watchstep_services.db.models.alerts import WHO_LENGTH
from watchstep_services.db.records import add_event


def labels_of(row: AlertInstanceRow, project: str, run: str) -> dict[str, str]:
    """An alert's labels: the rule config's, and those that every alert has."""
    own = {"project": project, "run": run, "name": row.name, "rule": row.rule, "severity": row.severity}
    return alert_labels(own, row.labels)


Reason = Literal["info", "dry_run", "inhibited", "silenced", "acknowledged", "known", "unknown", "incident"]
WEBHOOK = "webhook"
NOBODY = ""


def mute(session: Session, row: AlertInstanceRow, receiver: str, why: tuple[Reason, str], at_ns: int) -> None:
    """Record why a receiver was not notified, once for each time that the alert began to fire.

    Args:
        session: the transaction.
        row: the alert.
        receiver: name of the receiver; `WEBHOOK` for the addresses of its rule config, `NOBODY` if no receiver is notified.
        why: the reason and its detail. ``info``: alerts of severity info are not notified; ``dry_run``; ``inhibited``, by a rule config;
            ``silenced``, by a silence; ``acknowledged``, by a person: it is not repeated; ``known``: it fired on an earlier attempt;
            ``unknown``: the receiver does not exist; ``incident``, by an incident's id: its notification was sent before, and the
            next one names the alert.
        at_ns: when.
    """
    reason, detail = why
    values = {
        "instance_id": row.id,
        "episode": row.episode,
        "receiver": receiver,
        "reason": reason,
        "detail": detail[:WHO_LENGTH],
        "at_ns": at_ns,
    }
    insert_missing(session, Muted, values)


MOST_MATCHERS = 16
LONGEST_NS = 366 * 86400 * 10**9
MOST_ACTIVE = 500
"""Limit of unexpired silences of a project, because each changed alert is matched against all of them."""


@dataclass(frozen=True)
class Active:
    """An active silence."""

    id: int
    matchers: tuple[Matcher, ...]
    suppresses_stop: bool
    ends_ns: int

    def covers(self, labels: Mapping[str, str]) -> bool:
        """Whether it silences an alert with these labels."""
        return all(matcher.matches(labels) for matcher in self.matchers)


@dataclass(frozen=True)
class SilenceRequest:
    """A requested silence."""

    matchers: tuple[Matcher, ...]
    author: str
    reason: str
    starts_ns: int
    ends_ns: int
    suppresses_stop: bool


def read_matchers(texts: Iterable[str]) -> tuple[Matcher, ...]:
    """Parse matchers.

    Raises:
        ConfigError: one is not valid, or all of them match an empty set of labels, which would silence everything.
    """
    try:
        matchers = tuple(parse_matcher(text) for text in texts)
    except ValueError as error:
        raise ConfigError(f"matcher: {error}", "a matcher is LABEL=VALUE, with =, !=, =~ or !~") from error
    if not 0 < len(matchers) <= MOST_MATCHERS:
        raise ConfigError(f"{len(matchers)} matchers", f"give at least one, and no more than {MOST_MATCHERS}")
    if all(matcher.matches({}) for matcher in matchers):
        raise ConfigError(
            f"matchers {', '.join(map(str, matchers))}: would match every alert",
            'name at least one value; to match all on purpose, use severity=~".+"',
        )
    return matchers


def create(session: Session, project: str, request: SilenceRequest, now: int) -> Silence:
    """Add a silence.

    Raises:
        ConfigError: it ends before it begins, has ended, lasts too long, has no reason, or the project has too many.
    """
    starts = max(request.starts_ns, now)
    if not request.reason.strip():
        raise ConfigError("reason: empty", "give a reason, for people who wonder why they were not notified")
    if not starts < request.ends_ns <= starts + LONGEST_NS:
        raise ConfigError(
            f"silence from {starts} to {request.ends_ns} ns: not a valid interval",
            "choose an end after the start, and within 366 days of it",
        )
    active_rows = session.execute(
        select(Silence.id).where(Silence.project == project, Silence.ends_ns > now).limit(MOST_ACTIVE)
    ).all()
    if len(active_rows) >= MOST_ACTIVE:
        raise ConfigError(
            f"project {project}: has {len(active_rows)} silences, which is the limit",
            "expire some of them first, or match more alerts with one",
        )
    row = Silence(
        project=project,
        matchers=[_as_data(matcher) for matcher in request.matchers],
        author=request.author,
        reason=request.reason,
        suppresses_stop=request.suppresses_stop,
        created_ns=now,
        starts_ns=starts,
        ends_ns=request.ends_ns,
    )
    session.add(row)
    session.flush()
    return row


def expire(session: Session, row: Silence, who: str) -> None:
    """End a silence now; its groups are due at once. An ended silence is not changed."""
    now = read_clock(session)
    if row.ends_ns <= now:
        return
    row.ends_ns, row.starts_ns, row.expired_by = now, min(row.starts_ns, now), who
    session.flush()
    # The alerts that it silenced are not recorded, so all groups with alerts are due.
    wanted = select(GroupMember.group_id)
    session.execute(
        update(AlertGroup)
        .where(AlertGroup.project == row.project, AlertGroup.id.in_(wanted))
        .values(due_ns=now)
        .execution_options(synchronize_session=False)
    )


def active(session: Session, project: str, now_ns: int) -> list[Active]:
    """The active silences of a project."""
    rows = session.execute(
        select(Silence)
        .where(Silence.project == project, Silence.ends_ns > now_ns, Silence.starts_ns <= now_ns)
        .order_by(Silence.id)
    ).scalars()
    return [Active(row.id, matchers_of(row), row.suppresses_stop, row.ends_ns) for row in rows]


def covering(silences: Sequence[Active], labels: Mapping[str, str]) -> Active | None:
    """The silence that covers an alert; if there are several, the one that ends last."""
    return max(
        (silence for silence in silences if silence.covers(labels)),
        key=lambda silence: (silence.ends_ns, -silence.id),
        default=None,
    )


def matching(
    session: Session, project: str, matchers: Sequence[Matcher], limit: int
) -> list[AlertInstanceRow]:
    """Firing alerts that the matchers match, which a silence would cover."""
    rows = session.execute(
        select(AlertInstanceRow, RunRow)
        .join(RunRow, RunRow.id == AlertInstanceRow.run_id)
        .where(RunRow.project == project, AlertInstanceRow.phase == "firing")
        .order_by(AlertInstanceRow.fired_ns.desc(), AlertInstanceRow.id)
    ).all()
    matching_rows = (
        row
        for row, run in rows
        if all(matcher.matches(labels_of(row, run.project, run.run)) for matcher in matchers)
    )
    return [row for row, _ in zip(matching_rows, range(limit), strict=False)]


def matchers_of(row: Silence) -> tuple[Matcher, ...]:
    """The matchers of a silence."""
    return tuple(Matcher(matcher["label"], matcher["operator"], matcher["value"]) for matcher in row.matchers)


def _as_data(matcher: Matcher) -> dict[str, Any]:
    return {"label": matcher.label, "operator": matcher.operator, "value": matcher.value}


def acknowledge(session: Session, base_url: str, row: AlertInstanceRow, who: str, comment: str) -> None:
    """Acknowledge an alert, with an event. An earlier acknowledgement is replaced.

    Raises:
        ConfigError: it does not fire.
    """
    if row.phase != "firing":
        raise ConfigError(f"alert {row.name}: {row.phase}, not firing", "acknowledge it when it fires again")
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
    event = make_event("io.watchstep.alert.acknowledged", base_url, (run.project, run.run), now, data)
    add_event(session, run.id, event, now)
    for group in _groups(session, row):
        if not group.refresh:
            mute(session, row, group.receiver, ("acknowledged", who), now)


def withdraw(session: Session, row: AlertInstanceRow) -> None:
    """Withdraw an acknowledgement, so that the alert is repeated again. An alert without one is not changed."""
    if not row.acknowledged_by:
        return
    row.acknowledged_by, row.acknowledged_ns, row.acknowledgement = "", None, ""
    now = read_clock(session)
    for group in _groups(session, row):
        group.due_ns = now  # the flush determines when it is repeated


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
