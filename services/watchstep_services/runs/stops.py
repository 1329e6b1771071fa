"""Stops: which rule configs may stop jobs, the request, and the audit log that outlives the run.

There is one stop for each attempt, whoever requests it and how often. Its stages:

    ASK → ASKED → TERMINATING → TERMINATED → KILLING → KILLED

A stage that ends in -ING is committed before its signal is sent: a worker that reads it sends the signal again, or sees that the job
is gone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError
from watchstep_rules.config.rule_config import RuleConfig, StopAction
from watchstep_services.core.events import make_event
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import ActionRow, AuditEntry, ProjectRule, RuleConfigRow, RunRow, StopGrant
from watchstep_services.db.models.alerts import WHO_LENGTH
from watchstep_services.db.records import add_action, add_event

ASK, ASKED, TERMINATED, KILLED, UNCONFIRMED, TERMINATING, KILLING = 0, 1, 2, 3, 4, 5, 6
"""Not begun; all workers asked; the job asked to end; killed; asked, and nobody can say that anything came of it; about to be asked
to end; about to be killed."""

INTENDED = {TERMINATING: TERMINATED, KILLING: KILLED}
"""Of a stage whose signal may have been sent: the stage that it comes to."""


@dataclass(frozen=True)
class StopRequester:
    """Who asks for a stop, and what the audit log is to hold of it: by whose word, on which evidence."""

    who: str
    told: dict[str, Any] = field(default_factory=dict)


def stop_key(run_id: int, attempt: str) -> str:
    """The key of a stop. An attempt has one job at most, so this is a key of the job as well."""
    return f"stop:{run_id}:{attempt}"


def request_stop(
    session: Session,
    base_url: str,
    run_id: int,
    attempt: str,
    because: tuple[str, str],
    asked: StopRequester | None = None,
) -> int | None:
    """Put a stop into the outbox, with its event and a line in the audit log.

    Args:
        session: the transaction.
        base_url: of the API.
        run_id: which run.
        attempt: which attempt of it.
        because: id of the event that caused it (empty for an operator), and the reason for people.
        asked: for the audit log; an operator where it is left out.

    Returns:
        The action's id; None where the attempt has been asked to stop already. One that goes on though it was asked, for
        the stop could reach nothing, is asked anew: its job may have been bound since.
    """
    cause_id, reason = because
    run = session.get_one(RunRow, run_id)
    now = read_clock(session)
    data = {"attempt": attempt, "reason": reason, "cause": cause_id}
    event = make_event("watchstep.stop.requested", base_url, (run.project, run.run), now, data)
    payload = {"attempt": attempt, "reason": reason, "cause": cause_id or event.id}
    action = add_action(
        session,
        run_id,
        "stop",
        stop_key(run_id, attempt),
        {"event_id": event.id, "at_ns": now, "payload": payload},
    )
    if action is None:
        action = _again(session, run, attempt, {"event_id": event.id, "at_ns": now, "payload": payload})
    if action is not None:
        add_event(session, run_id, event, now)
    _audit(session, Subject(run.project, run.run, attempt), asked, now, data, repeated=action is None)
    return action


def _again(session: Session, run: RunRow, attempt: str, cause: dict[str, Any]) -> int | None:
    """Take up a stop that came to nothing; None where it is on its way, did end the attempt, or there is nothing to stop."""
    row = session.execute(
        select(ActionRow).where(ActionRow.key == stop_key(run.id, attempt)).with_for_update()
    ).scalar_one()
    if not (_is_in_vain(row) and _goes_on(run, attempt)):
        return None
    row.state, row.stage, row.stage_since_ns, row.finished_ns = "pending", 0, cause["at_ns"], None
    row.next_ns, row.event_id, row.payload = cause["at_ns"], cause["event_id"], dict(cause["payload"])
    return row.id


def take_up(session: Session, run_id: int, attempt: str) -> int | None:
    """Carry out a stop that reached nothing, now that the attempt's job is known; within the transaction that binds it.

    Nobody asks again by itself: the alert that asked for the stop goes on firing.

    Returns:
        The action's id; None where there is no such stop.
    """
    row = session.execute(
        select(ActionRow).where(ActionRow.key == stop_key(run_id, attempt)).with_for_update()
    ).scalar_one_or_none()
    if row is None or not _is_in_vain(row):
        return None
    run, now = session.get_one(RunRow, run_id), read_clock(session)
    if not _goes_on(run, attempt):
        return None
    row.state, row.stage, row.stage_since_ns, row.finished_ns, row.next_ns = "pending", 0, now, None, now
    details = {"reason": row.payload["reason"], "cause": row.payload["cause"], "detail": "its job was bound"}
    note(session, "repeated", Subject(run.project, run.run, attempt), "the service", now, details)
    return row.id


def _is_in_vain(row: ActionRow) -> bool:
    return row.state in ("failed", "skipped") or (row.state == "done" and row.stage == UNCONFIRMED)


def _goes_on(run: RunRow, attempt: str) -> bool:
    return run.attempt == attempt and (run.ended_ns is None or run.state == "lost")


def _audit(
    session: Session,
    subject: Subject,
    asked: StopRequester | None,
    now: int,
    data: dict[str, Any],
    *,
    repeated: bool,
) -> None:
    held = asked or StopRequester("an operator")
    details = {"reason": data["reason"], "cause": data["cause"], **held.told}
    note(session, "repeated" if repeated else "requested", subject, held.who, now, details)


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


_MOST_CONFIGS = 1000


@dataclass(frozen=True)
class Word:
    """By whose word a rule config may stop.

    Attributes:
        by: the owner's file, an operator's registration of an earlier version, or a grant.
        who: who gave it.
        reason: why.
        at_ns: when; 0 where it stands in a file.
        grant: the grant's id; 0 where there is none.
    """

    by: Literal["owner", "operator", "grant"]
    who: str
    reason: str
    at_ns: int = 0
    grant: int = 0

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)


def judges(config: RuleConfig) -> dict[str, Any]:
    """All of a rule config that decides when its alert fires, with defaults filled in."""
    data = config.as_data()
    params = config.parameters.model_dump(mode="json")
    return {
        "name": config.name,
        "rule": config.rule,
        "params": params,
        **{key: data[key] for key in ("tensors", "for", "keep_firing")},
    }


def digest_of(config: RuleConfig) -> str:
    """A hash of what `judges` says: a grant is for exactly this."""
    text = json.dumps(judges(config), sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest()


def word_for(session: Session, project: str, row: RuleConfigRow, config: RuleConfig) -> Word | None:
    """By whose word a rule config may stop jobs of a project now; None where it may not."""
    if row.granted_stop and row.origin == "owner":
        return Word("owner", "the owner's rule file", "it says 'stop'")
    if row.granted_stop:
        return Word("operator", "an operator", "registered with 'stop' before grants were asked for")
    granted = active_grant(session, project, config)
    if granted is None:
        return None
    return Word("grant", granted.granted_by, granted.reason, granted.granted_ns, granted.id)


def active_grant(session: Session, project: str, config: RuleConfig) -> StopGrant | None:
    """The grant that lets exactly this rule config stop."""
    return session.execute(
        select(StopGrant)
        .filter_by(project=project, digest=digest_of(config), revoked_ns=None)
        .order_by(StopGrant.id)
        .limit(1)
    ).scalar_one_or_none()


def allow(session: Session, project: str, config: RuleConfig, who: str, reason: str) -> StopGrant:
    """Let exactly this rule config stop jobs of a project. One that may already keeps its grant.

    Raises:
        ConfigError: no reason is given.
    """
    _check_reason(reason)
    held = active_grant(session, project, config)
    if held is not None:
        return held
    now = read_clock(session)
    row = StopGrant(
        project=project,
        name=config.name,
        rule=config.rule,
        digest=digest_of(config),
        judges=judges(config),
        granted_by=who,
        reason=reason,
        granted_ns=now,
    )
    session.add(row)
    session.flush()
    details = {"grant": row.id, "reason": reason, "digest": row.digest, "judges": row.judges}
    note(session, "allowed", Subject(project), who, now, details)
    return row


def revoke(session: Session, row: StopGrant, who: str, reason: str) -> None:
    """Take a grant back; what it has stopped stays stopped. Safe to repeat.

    Raises:
        ConfigError: no reason is given.
    """
    _check_reason(reason)
    if row.revoked_ns is not None:
        return
    row.revoked_by, row.revoked_reason, row.revoked_ns = who, reason, read_clock(session)
    details = {"grant": row.id, "reason": reason, "digest": row.digest, "judges": row.judges}
    note(session, "revoked", Subject(row.project), who, row.revoked_ns, details)


def _check_reason(reason: str) -> None:
    if not reason.strip():
        raise ConfigError("reason: none is given", "say why, for those who read the audit log")


def configs_called(session: Session, project: str, name: str, run: str = "") -> dict[str, RuleConfig]:
    """The rule configs of a name that say ``stop`` in a project, newest first, by their digests.

    Args:
        session: the transaction.
        project: whose.
        name: the rule config's.
        run: only of this run; of all, and of the project's own rules, where it is empty.
    """
    rows = session.execute(
        select(RuleConfigRow.data)
        .join(RunRow, RunRow.id == RuleConfigRow.run_id)
        .where(
            RunRow.project == project, RuleConfigRow.name == name, ~RuleConfigRow.origin.startswith("retired")
        )
        .where(RunRow.run == run if run else RunRow.run != "")
        .order_by(RuleConfigRow.id.desc())
        .limit(_MOST_CONFIGS)
    ).scalars()
    held = list(rows)
    if not run:
        own = session.get(ProjectRule, (project, name))
        held = [own.data, *held] if own is not None else held
    configs: dict[str, RuleConfig] = {}
    for data in held:
        try:
            config = RuleConfig.model_validate(data)
        except ValueError:
            continue  # of another version of Watchstep: it judges nothing either
        if any(isinstance(action, StopAction) for action in config.actions):
            configs.setdefault(digest_of(config), config)
    return configs


def the_config_called(
    session: Session, project: str, name: str, run: str = "", digest: str = ""
) -> RuleConfig:
    """The one rule config of a name that says ``stop``.

    Raises:
        NotFoundError: there is none.
        ConfigError: there are several that judge differently.
    """
    configs = configs_called(session, project, name, run)
    chosen = {held: config for held, config in configs.items() if held.startswith(digest)}
    if not chosen:
        where = f"run {project}/{run}" if run else f"project {project}"
        raise NotFoundError(
            f"rule {name!r} with 'stop' among its actions: none in {where}",
            "check the name, or register a run with that rule first",
        )
    if len(chosen) > 1:
        held = ", ".join(f"{digest[:12]}: {json.dumps(one.params)}" for digest, one in chosen.items())
        raise ConfigError(
            f"rule {name!r}: {len(chosen)} different ones ({held[:500]})",
            "name the run, or the beginning of the digest, of the one that may stop",
        )
    return next(iter(chosen.values()))
