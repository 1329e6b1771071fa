"""Silences and acknowledgements: what is known is not notified again."""

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
    """An alert's labels: the rule config's own, and those that every alert has."""
    own = {"project": project, "run": run, "name": row.name, "rule": row.rule, "severity": row.severity}
    return alert_labels(own, row.labels)


Reason = Literal["info", "dry_run", "inhibited", "silenced", "acknowledged", "known", "unknown", "incident"]
WEBHOOK = "webhook"
NOBODY = ""


def mute(session: Session, row: AlertInstanceRow, receiver: str, why: tuple[Reason, str], at_ns: int) -> None:
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
"""Silences of a project that have not ended: each alert that changes is held against all of them."""


@dataclass(frozen=True)
class Active:
    """A silence that is in force."""

    id: int
    matchers: tuple[Matcher, ...]
    holds_stop: bool
    ends_ns: int

    def covers(self, labels: Mapping[str, str]) -> bool:
        """Whether it silences an alert with these labels."""
        return all(matcher.holds(labels) for matcher in self.matchers)


@dataclass(frozen=True)
class SilenceRequest:
    """A silence that somebody asks for."""

    matchers: tuple[Matcher, ...]
    author: str
    reason: str
    starts_ns: int
    ends_ns: int
    holds_stop: bool


def read_matchers(texts: Iterable[str]) -> tuple[Matcher, ...]:
    """Matchers as they are written.

    Raises:
        ConfigError: one cannot be read, or all of them match what has no labels at all: that would silence everything.
    """
    try:
        matchers = tuple(parse_matcher(text) for text in texts)
    except ValueError as error:
        raise ConfigError(f"matcher: {error}", "a matcher is LABEL=VALUE, with =, !=, =~ or !~") from error
    if not 0 < len(matchers) <= MOST_MATCHERS:
        raise ConfigError(f"{len(matchers)} matchers", f"give at least one, and no more than {MOST_MATCHERS}")
    if all(matcher.holds({}) for matcher in matchers):
        raise ConfigError(
            f"matchers {', '.join(map(str, matchers))}: they match every alert",
            'name at least one value; severity=~".+" is said on purpose',
        )
    return matchers


def create(session: Session, project: str, asked: SilenceRequest, now: int) -> Silence:
    """Add a silence.

    Raises:
        ConfigError: it ends before it begins, has ended, lasts too long, has no reason, or there are too many.
    """
    starts = max(asked.starts_ns, now)
    if not asked.reason.strip():
        raise ConfigError("reason: none is given", "say why, for those who wonder why nobody was told")
    if not starts < asked.ends_ns <= starts + LONGEST_NS:
        raise ConfigError(
            f"a silence from {starts} to {asked.ends_ns} ns",
            "let it end later than it begins, within 366 days",
        )
    active_rows = session.execute(
        select(Silence.id).where(Silence.project == project, Silence.ends_ns > now).limit(MOST_ACTIVE)
    ).all()
    if len(active_rows) >= MOST_ACTIVE:
        raise ConfigError(f"{len(active_rows)} silences", "expire some of them first, or match more with one")
    row = Silence(
        project=project,
        matchers=[_as_data(matcher) for matcher in asked.matchers],
        author=asked.author,
        reason=asked.reason,
        holds_stop=asked.holds_stop,
        created_ns=now,
        starts_ns=starts,
        ends_ns=asked.ends_ns,
    )
    session.add(row)
    session.flush()
    return row


def expire(session: Session, row: Silence, who: str) -> None:
    """End a silence now; groups of what it held back are looked at again at once. One that has ended stays as it is."""
    now = read_clock(session)
    if row.ends_ns <= now:
        return
    row.ends_ns, row.starts_ns, row.expired_by = now, min(row.starts_ns, now), who
    session.flush()
    # Which alerts it held back is not kept: groups that have any look at them.
    wanted = select(GroupMember.group_id)
    session.execute(
        update(AlertGroup)
        .where(AlertGroup.project == row.project, AlertGroup.id.in_(wanted))
        .values(due_ns=now)
        .execution_options(synchronize_session=False)
    )


def active(session: Session, project: str, now_ns: int) -> list[Active]:
    """The silences that are in force."""
    rows = session.execute(
        select(Silence)
        .where(Silence.project == project, Silence.ends_ns > now_ns, Silence.starts_ns <= now_ns)
        .order_by(Silence.id)
    ).scalars()
    return [Active(row.id, matchers_of(row), row.holds_stop, row.ends_ns) for row in rows]


def covering(silences: Sequence[Active], labels: Mapping[str, str]) -> Active | None:
    """The silence of an alert; of several the one that ends last."""
    return max(
        (silence for silence in silences if silence.covers(labels)),
        key=lambda silence: (silence.ends_ns, -silence.id),
        default=None,
    )


def matching(
    session: Session, project: str, matchers: Sequence[Matcher], limit: int
) -> list[AlertInstanceRow]:
    """Alerts that fire now and that these matchers match: what a silence would hold back."""
    rows = session.execute(
        select(AlertInstanceRow, RunRow)
        .join(RunRow, RunRow.id == AlertInstanceRow.run_id)
        .where(RunRow.project == project, AlertInstanceRow.phase == "firing")
        .order_by(AlertInstanceRow.fired_ns.desc(), AlertInstanceRow.id)
    ).all()
    found = (
        row
        for row, run in rows
        if all(matcher.holds(labels_of(row, run.project, run.run)) for matcher in matchers)
    )
    return [row for row, _ in zip(found, range(limit), strict=False)]


def matchers_of(row: Silence) -> tuple[Matcher, ...]:
    """What a silence matches."""
    return tuple(Matcher(matcher["label"], matcher["operator"], matcher["value"]) for matcher in row.matchers)


def _as_data(matcher: Matcher) -> dict[str, Any]:
    return {"label": matcher.label, "operator": matcher.operator, "value": matcher.value}


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
