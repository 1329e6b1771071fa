"""The rule configs of a project, and how they did on its newest runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.format.layout import check_name
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.rule_files.rule_file import in_words
from watchstep_services.api.schemas.rule_pages import (
    HealthCounts,
    RuleAlertLink,
    RuleFacts,
    RuleTable,
    UnhealthyRun,
)
from watchstep_services.db.models import AlertInstanceRow, ProjectRule, RuleConfigRow, RuleStateRow, RunRow
from watchstep_services.notify.directory import known_receivers
from watchstep_services.runs.rule_health import no_data_reason, shown_memory, shown_state
from watchstep_services.service.context import Service
from watchstep_services.service.judging import load_config

_MOST_LISTED = 5
_MAX_PROBLEM = 500
_FOR_NEW_RUNS = ("owner", "project")

_Key = tuple[str, str]
"""Origin and name; the origin is empty for rule configs that new runs get, whichever of them replaces the other."""


@dataclass
class _RuleRecord:
    """What the newest runs say about a rule config; runs are added newest first.

    Attributes:
        row: its row on the newest of these runs; None if none has it.
        health: number of runs by health.
        errors: runs on which it could not be evaluated.
        silent: runs on which it had no data.
        runs: runs that have it.
        alerts: its alerts.
    """

    row: RuleConfigRow | None = None
    health: dict[str, int] = field(default_factory=dict)
    errors: list[UnhealthyRun] = field(default_factory=list)
    silent: list[UnhealthyRun] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    alerts: list[RuleAlertLink] = field(default_factory=list)

    def add_state(self, run: RunRow, row: RuleConfigRow, shown: str | None) -> None:
        """Add the shown part of the rule config's state on a run (`shown_state`)."""
        self.row = self.row or row
        self.runs.append(run.run)
        memory = shown_memory(shown)
        name = memory.health.value
        self.health[name] = self.health.get(name, 0) + 1
        if memory.health is RuleHealth.ERROR:
            self.errors.append(
                UnhealthyRun(run=run.run, health="error", problem=memory.problem[:_MAX_PROBLEM])
            )
        elif memory.health is RuleHealth.NO_DATA and len(self.silent) < _MOST_LISTED:
            problem = memory.problem or no_data_reason(run.health, load_config(row, None).config)
            self.silent.append(UnhealthyRun(run=run.run, health="no_data", problem=problem[:_MAX_PROBLEM]))


def read_rule_table(
    service: Service, session: Session, project: str, runs: int, *, operates: bool
) -> RuleTable:
    """Return the rule configs that new runs of a project get, and those that were set for single runs of the newest.

    Args:
        service: the service.
        session: the transaction.
        project: the project; it need not exist.
        runs: number of newest runs whose health and alerts are counted.
        operates: whether the caller may see webhook addresses and the path of the owner's file.

    Raises:
        BadNameError: the name of the project is not valid.
    """
    check_name("project", project)
    newest = list(
        session.execute(
            select(RunRow).filter_by(project=project).order_by(RunRow.id.desc()).limit(runs)
        ).scalars()
    )
    project_rows = list(
        session.execute(select(ProjectRule).filter_by(project=project).order_by(ProjectRule.name)).scalars()
    )
    records = _read_records(session, newest)
    owners = {config.name: config for config in service.owner_rules}
    builder = _FactBuilder(service, known_receivers(service, session, project), frozenset(owners), records)
    names = {row.name for row in project_rows}
    facts = [builder.facts(row.name, row.rule, "project", row.data) for row in project_rows]
    facts += [
        builder.facts(name, config.rule, "owner", config.as_data())
        for name, config in owners.items()
        if name not in names
    ]
    facts += [
        builder.facts(name, record.row.rule, origin, record.row.data)
        for (origin, name), record in records.items()
        if origin and record.row is not None
    ]
    settings = service.settings
    return RuleTable(
        rules=facts,
        runs=len(newest),
        owner_file=str(settings.rules_file) if operates and settings.rules_file is not None else "",
        owner_defaults=settings.rules_file is None,
    )


def _read_records(session: Session, newest: Sequence[RunRow]) -> dict[_Key, _RuleRecord]:
    """Return what the newest runs say about each rule config, by origin and name."""
    by_id = {run.id: run for run in newest}
    configs = session.execute(
        select(RuleConfigRow, RunRow.id, shown_state(RuleStateRow.state))
        .join(RunRow, RunRow.id == RuleConfigRow.run_id)
        .outerjoin(
            RuleStateRow,
            (RuleStateRow.config_id == RuleConfigRow.id) & (RuleStateRow.attempt == RunRow.attempt),
        )
        .where(RuleConfigRow.run_id.in_(list(by_id)), ~RuleConfigRow.origin.startswith("retired"))
        .order_by(RunRow.id.desc(), RuleConfigRow.id)
    ).all()
    records: dict[_Key, _RuleRecord] = {}
    keys: dict[int, _Key] = {}
    for row, run_id, shown in configs:
        key = keys[row.id] = ("" if row.origin in _FOR_NEW_RUNS else row.origin, row.name)
        records.setdefault(key, _RuleRecord()).add_state(by_id[run_id], row, shown)
    alerts = session.execute(
        select(AlertInstanceRow)
        .where(AlertInstanceRow.run_id.in_(list(by_id)))
        .order_by(AlertInstanceRow.run_id.desc(), AlertInstanceRow.id)
    ).scalars()
    for alert in alerts:
        alert_key = keys.get(alert.config_id)
        if alert_key is not None:
            records[alert_key].alerts.append(
                RuleAlertLink(
                    run=by_id[alert.run_id].run,
                    fingerprint=alert.fingerprint,
                    phase=alert.phase,
                    step=alert.step,
                )
            )
    return records


@dataclass(frozen=True)
class _FactBuilder:
    """Builds the rows of the table.

    Attributes:
        service: the service.
        receivers: names of the project's receivers.
        owners: names of the owner's rule configs.
        records: what the newest runs say.
    """

    service: Service
    receivers: frozenset[str]
    owners: frozenset[str]
    records: Mapping[_Key, _RuleRecord]

    def facts(self, name: str, rule: str, origin: str, data: Mapping[str, Any]) -> RuleFacts:
        """Return the row of a rule config."""
        parsed, problem = _parse(data)
        single = origin not in _FOR_NEW_RUNS
        record = self.records.get((origin if single else "", name), _RuleRecord())
        return RuleFacts(
            name=name,
            rule=rule,
            origin=origin,
            severity=str(data.get("severity", "")) if parsed is None else parsed.severity,
            config=dict(data),
            parameters=parameters_of(parsed),
            problem=problem,
            warnings=[] if parsed is None else self.service.unknown_receivers(parsed, self.receivers),
            replaces_owner=origin == "project" and name in self.owners,
            set_for=record.runs[:_MOST_LISTED] if single else [],
            health=HealthCounts(**record.health),
            unhealthy=[*record.errors, *record.silent][:_MOST_LISTED],
            alerts=record.alerts[:_MOST_LISTED],
            alerts_total=len(record.alerts),
        )


def _parse(data: Mapping[str, Any]) -> tuple[RuleConfig | None, str]:
    """Return a rule config, or None and why it cannot be read. Reasons contain no values, which may be webhook addresses."""
    try:
        return RuleConfig.model_validate(json.loads(json.dumps(data))), ""
    except ValidationError as error:  # such as a rule that another version had
        faults = error.errors(include_input=False, include_url=False)
        problem = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {in_words(fault['msg'])}" for fault in faults
        )
        return None, problem[:_MAX_PROBLEM]
    except Exception as error:  # noqa: BLE001 - an unreadable config must not hide the others
        return None, f"cannot be read ({type(error).__name__})"


def parameters_of(config: RuleConfig | None) -> dict[str, Any]:
    """Return all parameters of a rule config as JSON-ready data, also the defaults; empty if there is none."""
    if config is None:
        return {}
    parameters: dict[str, Any] = config.parameters.model_dump(mode="json")
    return parameters
