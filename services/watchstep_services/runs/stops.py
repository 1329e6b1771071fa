"""Stops: which rule configs may stop jobs, the request, and the audit log, which outlives the run.

There is one stop for each attempt, whoever requests it and however often. Its stages:

    PENDING → REQUESTED → TERMINATING → TERMINATED → KILLING → KILLED

A stage that ends in -ING is committed before its signal is sent. A worker that reads it sends the signal again, or detects that the
job is gone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig, StopAction
from watchstep_services.core.events import make_event
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import ActionRow, AuditEntry, ProjectRule, RuleConfigRow, RunRow, StopGrant
from watchstep_services.db.models.alerts import WHO_LENGTH
from watchstep_services.db.records import add_action, add_event


class StopStage(IntEnum):
    """The stage of a stop; the values are stored in the database."""

    PENDING = 0
    """Not begun."""

    REQUESTED = 1
    """All workers were requested to stop."""

    TERMINATED = 2
    """The job received SIGTERM."""

    KILLED = 3
    """The job received SIGKILL."""

    UNCONFIRMED = 4
    """The workers were requested to stop, and nothing confirms that they did."""

    TERMINATING = 5
    """SIGTERM is about to be sent."""

    KILLING = 6
    """SIGKILL is about to be sent."""


SIGNALS_SENT: dict[int, StopStage] = {
    StopStage.TERMINATING: StopStage.TERMINATED,
    StopStage.KILLING: StopStage.KILLED,
}
"""The stage that follows a stage with a signal that may have been sent."""


@dataclass(frozen=True)
class StopRequester:
    """Who requests a stop, and details for the audit log: the permission and the evidence."""

    who: str
    details: dict[str, Any] = field(default_factory=dict)


def stop_key(run_id: int, attempt: str) -> str:
    """The key of a stop. An attempt has at most one job, so it is also a key of the job."""
    return f"stop:{run_id}:{attempt}"


def request_stop(
    session: Session,
    base_url: str,
    run_id: int,
    attempt: str,
    because: tuple[str, str],
    requester: StopRequester | None = None,
) -> int | None:
    """Add a stop to the outbox, with its event and an entry in the audit log.

    Args:
        session: the transaction.
        base_url: URL of the API.
        run_id: id of the run.
        attempt: name of the attempt.
        because: id of the event that caused it (empty for an operator), and the reason as text.
        requester: for the audit log; "an operator" if left out.

    Returns:
        The action's id; None if the attempt's stop was requested before. A stop that had no effect although its attempt
        still runs is repeated, because the attempt's job may have been bound since.
    """
    cause_id, reason = because
    run = session.get_one(RunRow, run_id)
    now = read_clock(session)
    data = {"attempt": attempt, "reason": reason, "cause": cause_id}
    event = make_event("io.watchstep.stop.requested", base_url, (run.project, run.run), now, data)
    payload = {"attempt": attempt, "reason": reason, "cause": cause_id or event.id}
    action = add_action(
        session,
        run_id,
        "stop",
        stop_key(run_id, attempt),
        {"event_id": event.id, "at_ns": now, "payload": payload},
    )
    if action is None:
        action = _repeat(session, run, attempt, {"event_id": event.id, "at_ns": now, "payload": payload})
    if action is not None:
        add_event(session, run_id, event, now)
    _audit(session, Subject(run.project, run.run, attempt), requester, now, data, repeated=action is None)
    return action


def _repeat(session: Session, run: RunRow, attempt: str, cause: dict[str, Any]) -> int | None:
    """Repeat a stop that had no effect; None if it is in progress, ended the attempt, or the attempt does not run."""
    row = session.execute(
        select(ActionRow).where(ActionRow.key == stop_key(run.id, attempt)).with_for_update()
    ).scalar_one()
    if not (_had_no_effect(row) and _runs(run, attempt)):
        return None
    row.state, row.stage, row.stage_since_ns, row.finished_ns = "pending", 0, cause["at_ns"], None
    row.next_ns, row.event_id, row.payload = cause["at_ns"], cause["event_id"], dict(cause["payload"])
    return row.id


def retry_unconfirmed(session: Session, run_id: int, attempt: str) -> int | None:
    """Repeat a stop that had no effect, now that the attempt's job is known, in the transaction that binds the job.

    Nothing else requests it again, because the alert that requested it still fires.

    Returns:
        The action's id; None if there is no such stop.
    """
    row = session.execute(
        select(ActionRow).where(ActionRow.key == stop_key(run_id, attempt)).with_for_update()
    ).scalar_one_or_none()
    if row is None or not _had_no_effect(row):
        return None
    run, now = session.get_one(RunRow, run_id), read_clock(session)
    if not _runs(run, attempt):
        return None
    row.state, row.stage, row.stage_since_ns, row.finished_ns, row.next_ns = "pending", 0, now, None, now
    details = {"reason": row.payload["reason"], "cause": row.payload["cause"], "detail": "its job was bound"}
    note(session, "repeated", Subject(run.project, run.run, attempt), "the service", now, details)
    return row.id


def _had_no_effect(row: ActionRow) -> bool:
    return row.state in ("failed", "skipped") or (row.state == "done" and row.stage == StopStage.UNCONFIRMED)


def _runs(run: RunRow, attempt: str) -> bool:
    return run.attempt == attempt and (run.ended_ns is None or run.state == "lost")


def _audit(
    session: Session,
    subject: Subject,
    requester: StopRequester | None,
    now: int,
    data: dict[str, Any],
    *,
    repeated: bool,
) -> None:
    requester = requester or StopRequester("an operator")
    details = {"reason": data["reason"], "cause": data["cause"], **requester.details}
    note(session, "repeated" if repeated else "requested", subject, requester.who, now, details)


Kind = Literal[
    "requested", "repeated", "would_have", "tried", "ended", "allowed", "revoked", "restart_allowed"
]


@dataclass(frozen=True)
class Subject:
    """The subject of an audit entry; run and attempt are empty for entries on a project."""

    project: str
    run: str = ""
    attempt: str = ""


def note(session: Session, kind: Kind, subject: Subject, who: str, at_ns: int, data: dict[str, Any]) -> None:
    """Add an entry to the audit log.

    Args:
        session: the transaction of the audited change.
        kind: ``requested``: a stop was requested; ``repeated``: it was requested again; ``would_have``: a rule
            that may not stop would have; ``tried``, ``ended``: a try or the end of a stop; ``allowed``, ``revoked``: a rule's
            permission to stop; ``restart_allowed``: a stopped run may start again.
        subject: project, run and attempt.
        who: who requested, tried or allowed it.
        at_ns: when.
        data: further data, JSON-ready.
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
class StopPermission:
    """The permission of a rule config to stop jobs.

    Attributes:
        by: the owner's file, an operator's registration of an earlier version, or a grant.
        who: who gave it.
        reason: why.
        at_ns: when; 0 for a file.
        grant: the grant's id; 0 if there is none.
    """

    by: Literal["owner", "operator", "grant"]
    who: str
    reason: str
    at_ns: int = 0
    grant: int = 0

    def as_data(self) -> dict[str, Any]:
        """Convert to JSON-ready data."""
        return asdict(self)


def judges(config: RuleConfig) -> dict[str, Any]:
    """The fields of a rule config that determine when its alert fires, with defaults filled in."""
    data = config.as_data()
    params = config.parameters.model_dump(mode="json")
    return {
        "name": config.name,
        "rule": config.rule,
        "params": params,
        **{key: data[key] for key in ("tensors", "for", "keep_firing")},
    }


def digest_of(config: RuleConfig) -> str:
    """A hash of the result of `judges`; a grant is valid for exactly this."""
    text = json.dumps(judges(config), sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest()


def permission_for(
    session: Session, project: str, row: RuleConfigRow, config: RuleConfig
) -> StopPermission | None:
    """The permission of a rule config to stop jobs of a project now; None if it has none."""
    if row.granted_stop and row.origin == "owner":
        is_default = any(config.as_data() == default.as_data() for default in DEFAULT_RULES)
        whose = "a default rule" if is_default else "the owner's rule file"
        return StopPermission("owner", whose, "it contains 'stop'")
    if row.granted_stop:
        return StopPermission("operator", "an operator", "registered with 'stop' before grants were required")
    granted = active_grant(session, project, config)
    if granted is None:
        return None
    return StopPermission("grant", granted.granted_by, granted.reason, granted.granted_ns, granted.id)


def active_grant(session: Session, project: str, config: RuleConfig) -> StopGrant | None:
    """The grant that allows exactly this rule config to stop jobs."""
    return session.execute(
        select(StopGrant)
        .filter_by(project=project, digest=digest_of(config), revoked_ns=None)
        .order_by(StopGrant.id)
        .limit(1)
    ).scalar_one_or_none()


def allow(session: Session, project: str, config: RuleConfig, who: str, reason: str) -> StopGrant:
    """Allow exactly this rule config to stop jobs of a project. An existing grant is kept.

    Raises:
        ConfigError: the reason is empty.
    """
    _check_reason(reason)
    grant = active_grant(session, project, config)
    if grant is not None:
        return grant
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
    """Revoke a grant; stops that it allowed are not undone. Safe to repeat.

    Raises:
        ConfigError: the reason is empty.
    """
    _check_reason(reason)
    if row.revoked_ns is not None:
        return
    row.revoked_by, row.revoked_reason, row.revoked_ns = who, reason, read_clock(session)
    details = {"grant": row.id, "reason": reason, "digest": row.digest, "judges": row.judges}
    note(session, "revoked", Subject(row.project), who, row.revoked_ns, details)


def _check_reason(reason: str) -> None:
    if not reason.strip():
        raise ConfigError("reason: empty", "give a reason, for readers of the audit log")


def configs_by_name(session: Session, project: str, name: str, run: str = "") -> dict[str, RuleConfig]:
    """The rule configs of a name with a ``stop`` action in a project, newest first, by digest.

    Args:
        session: the transaction.
        project: name of the project.
        name: name of the rule config.
        run: name of the run; if empty, all runs and the project's own rules.
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
    documents = list(rows)
    if not run:
        own = session.get(ProjectRule, (project, name))
        documents = [own.data, *documents] if own is not None else documents
    configs: dict[str, RuleConfig] = {}
    for data in documents:
        try:
            config = RuleConfig.model_validate(data)
        except ValueError:
            continue  # of another version of Watchstep, and not evaluated either
        if any(isinstance(action, StopAction) for action in config.actions):
            configs.setdefault(digest_of(config), config)
    return configs


def find_config_by_name(
    session: Session, project: str, name: str, run: str = "", digest: str = ""
) -> RuleConfig:
    """The one rule config of a name with a ``stop`` action.

    Raises:
        NotFoundError: there is none.
        ConfigError: there are several that differ.
    """
    configs = configs_by_name(session, project, name, run)
    chosen = {full: config for full, config in configs.items() if full.startswith(digest)}
    if not chosen:
        where = f"run {project}/{run}" if run else f"project {project}"
        raise NotFoundError(
            f"rule {name!r} with a 'stop' action: not found in {where}",
            "check the name, or register a run with that rule first",
        )
    if len(chosen) > 1:
        choices = ", ".join(
            f"{digest[:12]}: {json.dumps(config.params)}" for digest, config in chosen.items()
        )
        raise ConfigError(
            f"rule {name!r}: ambiguous, {len(chosen)} different configs ({choices[:500]})",
            "name the run, or a prefix of the digest, of the config that may stop",
        )
    return next(iter(chosen.values()))
