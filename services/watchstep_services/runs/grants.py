"""Which rule configs may stop jobs: those of the owner's file, and those that an operator has allowed, exactly as they are."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError
from watchstep_rules.config.rule_config import RuleConfig, StopAction
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import ProjectRule, RuleConfigRow, RunRow, StopGrant
from watchstep_services.runs.audit import Subject, note

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
    told = {"grant": row.id, "reason": reason, "digest": row.digest, "judges": row.judges}
    note(session, "allowed", Subject(project), who, now, told)
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
    told = {"grant": row.id, "reason": reason, "digest": row.digest, "judges": row.judges}
    note(session, "revoked", Subject(row.project), who, row.revoked_ns, told)


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
    found: dict[str, RuleConfig] = {}
    for data in held:
        try:
            config = RuleConfig.model_validate(data)
        except ValueError:
            continue  # of another version of Watchstep: it judges nothing either
        if any(isinstance(action, StopAction) for action in config.actions):
            found.setdefault(digest_of(config), config)
    return found


def the_config_called(
    session: Session, project: str, name: str, run: str = "", digest: str = ""
) -> RuleConfig:
    """The one rule config of a name that says ``stop``.

    Raises:
        NotFoundError: there is none.
        ConfigError: there are several that judge differently.
    """
    found = configs_called(session, project, name, run)
    chosen = {held: config for held, config in found.items() if held.startswith(digest)}
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
