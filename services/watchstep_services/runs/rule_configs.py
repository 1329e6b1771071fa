"""The rule configs of a run: the owner's, its project's, an operator's and a recorder's, and which one replaces which."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from watchstep.errors import RuleError
from watchstep.format.capture_needs import CaptureNeed
from watchstep.format.control import ControlDocument
from watchstep_rules.config.attached import capture_needs
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sql.rule import Sql
from watchstep_services.db.engine import Database
from watchstep_services.db.lease import RUN_LEASE
from watchstep_services.db.models import ProjectRule, RuleConfigRow, RuleStateRow, RunRow
from watchstep_services.db.records import hint
from watchstep_services.runs.control import set_needs
from watchstep_services.runs.lifecycle import ENDED
from watchstep_services.service.judging import load_config

Origin = Literal["owner", "project", "operator", "recorder"]

_ConfigRows = dict[tuple[str, str], RuleConfigRow]
_REPLACED_BY: Mapping[Origin, tuple[Origin, ...]] = {
    "owner": ("project", "operator"),
    "project": ("operator",),
    "operator": (),
    # Not by the owner's: most of those are the defaults, which a program may want in addition to its own parameters.
    "recorder": ("project", "operator"),
}

STRONGER_THAN_RECORDERS = _REPLACED_BY["recorder"]

MOST_RULES = 100
"""Limit of the rule configs that recorders request for a run."""

OVERRIDDEN = "retired-recorder"
"""Origin of a recorder's rule config that is not evaluated, because a config of its name replaces it."""


@dataclass(frozen=True)
class EncodedRule:
    """A rule config with what its registration compares and stores.

    Attributes:
        config: the rule config.
        data: it as data.
        content: it as JSON without its actions.
        needs: what it needs the workers to capture.
    """

    config: RuleConfig
    data: dict[str, Any]
    content: str
    needs: tuple[CaptureNeed, ...]


def encode(configs: Iterable[RuleConfig]) -> tuple[EncodedRule, ...]:
    """Encode rule configs before a transaction, because all stops wait for the write lock of SQLite."""
    return tuple(_encoded(config) for config in configs)


def put_all(
    session: Session,
    run: RunRow,
    owners: Sequence[EncodedRule],
    requested: Sequence[EncodedRule],
    origin: Origin,
) -> None:
    """Set the owner's rule configs of a run, its project's, and the requested ones.

    If names are equal, an operator's config replaces all others, and the project's replaces the owner's and a recorder's. A
    replaced recorder's config is kept as overridden, and is evaluated when it is requested again without a replacement. A
    recorder's configs inhibit no others, and are left out if an equal config exists. A change fences an evaluation in progress.

    Raises:
        RuleError: a recorder has requested more than `MOST_RULES` for the run.
    """
    rows = _config_rows(session, run)
    before = {name: row.data for name, row in rows.items()}
    if origin == "operator":
        _put(session, run, "operator", requested, rows)
    of_run = of_project(session, run.project)
    _put(session, run, "project", of_run, rows)
    _put_owners(session, run, owners, rows)
    if origin == "recorder":
        existing = {rule.content for rule in (*owners, *of_run)}
        new = [rule for rule in requested if rule.content not in existing]
        requested = [_without_inhibits(rule) for rule in new]
        _put(session, run, "recorder", requested, rows)
        # Configs of earlier requests are still evaluated.
        count = sum(kind in {"recorder", OVERRIDDEN} for kind, _ in rows)
        if count > MOST_RULES:
            raise RuleError(
                f"{count} rules with those requested before; a recorder may request {MOST_RULES}",
                "have an operator remove some of the run's rules",
            )
    if {name: row.data for name, row in rows.items()} != before:
        _request_needs(session, run, rows, (*owners, *of_run, *requested))
        if before:
            _fence(session, run)


def apply_owner_rules(database: Database, owners: Sequence[RuleConfig]) -> None:
    """Set the owner's current rule configs of every run that has not ended, and retire earlier ones.

    A service that starts with another rule file, or with none, evaluates and stops by that file alone.
    """
    encoded = encode(owners)
    with database.read() as session:
        run_ids = list(session.execute(select(RunRow.id).where(RunRow.state.not_in(ENDED))).scalars())
    for run_id in run_ids:
        with database.write() as session:
            run = session.get_one(RunRow, run_id)
            rows = _config_rows(session, run)
            before = {name: row.data for name, row in rows.items()}
            _put_owners(session, run, encoded, rows)
            if {name: row.data for name, row in rows.items()} != before:
                _request_needs(session, run, rows, encoded)
                _fence(session, run)


def put_one(session: Session, run: RunRow, config: RuleConfig) -> None:
    """Set an operator's rule config of one run, which is evaluated from the next rows on; fences an evaluation in progress."""
    rows = _config_rows(session, run)
    rules = encode([config])
    _put(session, run, "operator", rules, rows)
    _request_needs(session, run, rows, rules)
    _fence(session, run)


def remove(session: Session, run: RunRow, row: RuleConfigRow) -> None:
    """Retire a rule config of one run; its findings remain."""
    _retire(row)
    _request_needs(session, run, _config_rows(session, run))
    _fence(session, run)


def in_force(session: Session, run: RunRow, name: str) -> RuleConfigRow | None:
    """The evaluated rule config of a name: the operator's before the project's, the owner's and a recorder's."""
    rows = {kind: row for (kind, row_name), row in _config_rows(session, run).items() if row_name == name}
    return next(
        (rows[origin] for origin in ("operator", "project", "owner", "recorder") if origin in rows), None
    )


def of_project(session: Session, project: str) -> list[EncodedRule]:
    """The rule configs of a project, by name; configs that this version cannot read are left out."""
    rows = session.execute(
        select(ProjectRule).filter_by(project=project).order_by(ProjectRule.name)
    ).scalars()
    configs = []
    for row in rows:
        try:
            configs.append(_decoded(json.dumps(row.data, sort_keys=True)))
        except ValueError:
            continue
    return configs


@functools.lru_cache(maxsize=1024)
def _decoded(data: str) -> EncodedRule:
    return _encoded(RuleConfig.model_validate(json.loads(data)))


def _encoded(config: RuleConfig) -> EncodedRule:
    content = config.model_copy(update={"actions": ()}).model_dump_json(by_alias=True)
    # A query needs no more than what is recorded by default, and checking it takes a process.
    needs = () if config.rule == Sql.name else capture_needs([config])
    return EncodedRule(config, config.as_data(), content, needs)


def _without_inhibits(rule: EncodedRule) -> EncodedRule:
    return _encoded(rule.config.without_inhibits()) if rule.config.inhibits else rule


def _config_rows(session: Session, run: RunRow) -> _ConfigRows:
    rows = session.execute(select(RuleConfigRow).filter_by(run_id=run.id)).scalars()
    return {(row.origin, row.name): row for row in rows}


def _put(
    session: Session, run: RunRow, origin: Origin, rules: Sequence[EncodedRule], rows: _ConfigRows
) -> None:
    changed: list[int] = []
    for rule in rules:
        changed += _put_rule(session, run, origin, rule, rows)
    if changed:
        # Their states were accumulated under other parameters. One statement, because each first writes the changes so far.
        session.execute(delete(RuleStateRow).where(RuleStateRow.config_id.in_(changed)))


def _put_rule(
    session: Session, run: RunRow, origin: Origin, rule: EncodedRule, rows: _ConfigRows
) -> list[int]:
    """Set one rule config; return the id of the row if it replaces other data."""
    config, changed = rule.config, []
    if any((stronger, config.name) in rows for stronger in _REPLACED_BY[origin]):
        if origin == "recorder":
            _put_overridden(session, run, rule, rows)
        return []
    overridden = rows.pop((OVERRIDDEN, config.name), None) if origin == "recorder" else None
    if overridden is not None:
        overridden.origin = origin
        rows[origin, config.name] = overridden
    existing = rows.get((origin, config.name))
    stops = config.stops and origin == "owner"
    if existing is None:
        row = RuleConfigRow(
            run_id=run.id,
            origin=origin,
            name=config.name,
            rule=config.rule,
            data=rule.data,
            granted_stop=stops,
        )
        session.add(row)
        rows[origin, config.name] = row
    elif existing.data != rule.data:
        existing.data, existing.rule, existing.granted_stop = rule.data, config.rule, stops
        changed.append(existing.id)
    for weaker, stronger in _REPLACED_BY.items():
        if origin in stronger and (weaker, config.name) in rows:
            row = rows.pop((weaker, config.name))
            if weaker == "recorder":
                row.origin, row.granted_stop = OVERRIDDEN, False
                rows[OVERRIDDEN, config.name] = row
            else:
                _retire(row)
    return changed


def _put_owners(session: Session, run: RunRow, owners: Sequence[EncodedRule], rows: _ConfigRows) -> None:
    _put(session, run, "owner", owners, rows)
    names = {rule.config.name for rule in owners}
    for origin, name in [key for key in rows if key[0] == "owner" and key[1] not in names]:
        _retire(rows.pop((origin, name)))


def _put_overridden(session: Session, run: RunRow, rule: EncodedRule, rows: _ConfigRows) -> None:
    config = rule.config
    row = rows.get((OVERRIDDEN, config.name))
    if row is None:
        row = RuleConfigRow(run_id=run.id, origin=OVERRIDDEN, name=config.name, granted_stop=False)
        session.add(row)
        rows[OVERRIDDEN, config.name] = row
    row.rule, row.data = config.rule, rule.data


def _retire(row: RuleConfigRow) -> None:
    """Retire a config; its alerts still refer to it, without its actions."""
    row.granted_stop = False
    row.origin = f"retired-{row.id}"[:16]
    row.data = {**row.data, "actions": []}


def _request_needs(
    session: Session, run: RunRow, rows: _ConfigRows, encoded: Sequence[EncodedRule] = ()
) -> None:
    """State in the control document what the evaluated rule configs need the workers to capture.

    A config that cannot be read now, because it is of another version or its program cannot be run, keeps its stated needs.

    Args:
        session: the transaction.
        run: the run.
        rows: its rule configs.
        encoded: rule configs that need not be read from their rows.
    """
    stated = {need.rule: need for need in ControlDocument.from_data(run.control).needs}
    by_name: dict[str, list[EncodedRule]] = {}
    for rule in encoded:
        by_name.setdefault(rule.config.name, []).append(rule)
    needs: list[CaptureNeed] = []
    for (origin, name), row in rows.items():
        if origin.startswith("retired") or row.rule == Sql.name:
            continue  # a query needs no more than what is recorded by default, and checking it takes a process
        known = next((rule for rule in by_name.get(name, ()) if rule.data == row.data), None)
        if known is not None:
            needs += known.needs
        elif (config := load_config(row, None).config) is not None:
            needs += capture_needs([config])
        elif name in stated:
            needs.append(stated[name])
    session.flush()
    set_needs(session, run.id, needs)


def _fence(session: Session, run: RunRow) -> None:
    """Fence an evaluation that began under other rules; the run is due at once."""
    session.flush()
    RUN_LEASE.revoke(session, run.id)
    hint(session, run.id)
