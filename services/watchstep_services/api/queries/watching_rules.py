"""Rule configs that judge a tensor, with their thresholds: constant ones, and those in their findings about it."""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from watchstep.errors import RuleError
from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.signals.constant_thresholds import constant_thresholds
from watchstep_services.api.lookup import find_run
from watchstep_services.api.queries.tensor_answers import RecordedThreshold, ThresholdOutput, WatchingRule
from watchstep_services.db.models import FindingRow, RuleConfigRow
from watchstep_services.service.judging import load_config

MAX_FINDINGS = 500
"""Findings of one rule config in a response."""

_MAX_CHARACTERS = 500


def rules_state(session: Session, project: str, run: str) -> list[Any]:
    """Return what identifies the rule configs of a run and their findings, JSON-ready.

    Raises:
        BadNameError, NotFoundError: as `find_run`.
    """
    rows = _configs(session, find_run(session, project, run).id)
    newest, count = session.execute(
        select(func.max(FindingRow.id), func.count()).where(
            FindingRow.config_id.in_([row.id for row in rows])
        )
    ).one()
    return [[[row.id, row.name, row.rule, row.data] for row in rows], newest, count]


def watching_rules(session: Session, project: str, run: str, info: TensorInfo) -> list[WatchingRule]:
    """Return the rule configs of a run that judge a tensor, by name. Those for which it is only evidence are omitted.

    Raises:
        BadNameError, NotFoundError: as `find_run`.
    """
    watching = []
    for row in _configs(session, find_run(session, project, run).id):
        config = load_config(row, None).config
        if config is not None and _judges(config, info):
            watching.append(_described(session, row, config, info.name))
    return sorted(watching, key=lambda rule: rule.name)


def _configs(session: Session, run_id: int) -> list[RuleConfigRow]:
    rows = session.execute(
        select(RuleConfigRow)
        .where(RuleConfigRow.run_id == run_id, ~RuleConfigRow.origin.startswith("retired"))
        .order_by(RuleConfigRow.id)
    )
    return list(rows.scalars())


def _judges(config: RuleConfig, info: TensorInfo) -> bool:
    try:
        needs = config.implementation.needed(config.parameters)
    except (RuleError, ValueError):  # reported by the evaluation
        return False
    return not needs.is_evidence(info) and config.tensors.selects(info, needs)


def _described(session: Session, row: RuleConfigRow, config: RuleConfig, tensor: str) -> WatchingRule:
    about = (FindingRow.config_id == row.id) & (FindingRow.finding["tensor"].as_string() == tensor)
    found = session.execute(
        select(FindingRow)
        .where(about)
        .order_by(FindingRow.attempt, FindingRow.step, FindingRow.id)
        .limit(MAX_FINDINGS)
    ).scalars()
    findings = [_finding(finding) for finding in found]
    left_out = 0
    if len(findings) == MAX_FINDINGS:
        left_out = session.execute(select(func.count()).where(about)).scalar_one() - MAX_FINDINGS
    return WatchingRule(
        name=row.name,
        rule=row.rule,
        severity=config.severity,
        thresholds=[
            ThresholdOutput(figure=each.figure, parameter=each.parameter, value=each.value, side=each.side)
            for each in constant_thresholds(row.rule, config.parameters)
        ],
        findings=findings,
        left_out=left_out,
    )


def _finding(row: FindingRow) -> RecordedThreshold:
    finding = row.finding
    return RecordedThreshold(
        attempt=row.attempt,
        step=row.step,
        mode=str(finding.get("mode", "")),
        worker=int(finding.get("worker", 0)),
        value=_real(finding.get("value")),
        threshold=_real(finding.get("threshold")),
        message=str(finding.get("message", ""))[:_MAX_CHARACTERS],
    )


def _real(value: Any) -> float | None:
    """Return a stored number, which is text if it is not finite."""
    number = float(value) if isinstance(value, (int, float)) else math.nan
    return number if math.isfinite(number) else None
