"""Results of backtests as JSON data, for files and the API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from watchstep_rules.backtest.backtest import (
    AttemptOutcome,
    BacktestOutcome,
    Failed,
    FirstAlert,
    JudgingOrder,
    Replayed,
    ReplayOutcome,
)
from watchstep_rules.backtest.sweep import Setting, Variation
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase, Transition
from watchstep_rules.engine.explanation import RunName, event_message
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.rule import Finding

SCHEMA_VERSION = 1


def report(
    results: Iterable[Replayed | Failed], variations: Sequence[Variation], findings: int = 100
) -> dict[str, Any]:
    """All results as data, sorted by the location of the run.

    Args:
        results: results of `watchstep_rules.backtest.backtest.backtest_many`.
        variations: variations of the sweeps.
        findings: limit of findings listed for each rule config on each attempt; the rest are counted.
    """
    ordered = sorted(results, key=location_of)
    tested = [result for result in ordered if isinstance(result, Replayed)]
    return {
        "schema": SCHEMA_VERSION,
        "runs": [result_as_data(result, findings) for result in tested],
        "sweep": [_variation(place, variation, tested) for place, variation in enumerate(variations)],
        "failed": [result_as_data(result) for result in ordered if isinstance(result, Failed)],
    }


def read_report(data: dict[str, Any]) -> tuple[list[Replayed | Failed], list[Variation]]:
    """The inverse of `report`; variations contain only their settings.

    Raises:
        ValueError, KeyError, TypeError: the data are not a report.
    """
    results = [result_from_data(result) for result in (*data["runs"], *data["failed"])]
    variations = [
        Variation(
            tuple(_setting(name, value) for name, value in variation["settings"].items()),
            bool(variation["current"]),
            (),
        )
        for variation in data["sweep"]
    ]
    return sorted(results, key=location_of), variations


def _setting(name: str, value: Any) -> Setting:
    config, _, parameter = name.rpartition(".")
    return Setting(config, parameter, value)


def result_as_data(result: Replayed | Failed, findings: int = 100) -> dict[str, Any]:
    """The result of one run as data, with at most ``findings`` findings for each rule config on each attempt."""
    if isinstance(result, Failed):
        return {"location": result.location, "what": result.what, "hint": result.hint}
    fired = [None if first is None else vars(first) for first in result.fired]
    return {**_run(result.outcome, findings), "fired": fired}


def result_from_data(data: dict[str, Any]) -> Replayed | Failed:
    """The inverse of `result_as_data`, with the listed findings.

    Raises:
        ValueError, KeyError, TypeError: the data are not a result.
    """
    if "what" in data:
        return Failed(str(data["location"]), str(data["what"]), str(data["hint"]))
    attempts = [
        AttemptOutcome(
            str(attempt["attempt"]),
            JudgingOrder(attempt["order"]),
            tuple(map(str, attempt["notes"])),
            int(attempt["rows"]),
            [_outcome_from(outcome) for outcome in attempt["rules"]],
        )
        for attempt in data["attempts"]
    ]
    outcome = BacktestOutcome(
        str(data["location"]), str(data["project"]), str(data["run"]), attempts, dict(data["damaged"])
    )
    return Replayed(outcome, tuple(None if first is None else FirstAlert(**first) for first in data["fired"]))


def _outcome_from(data: dict[str, Any]) -> ReplayOutcome:
    return ReplayOutcome(
        RuleConfig.model_validate(data["rule_config"]),
        [Finding.model_validate(finding) for finding in data["findings"]],
        int(data["found"]),
        [_transition_from(change) for change in data["transitions"]],
        RuleHealth(data["health"]),
        str(data["problem"]),
    )


def _transition_from(data: dict[str, Any]) -> Transition:
    return Transition(
        phase=Phase(data["phase"]),
        step=int(data["step"]),
        finding=None if data["finding"] is None else Finding.model_validate(data["finding"]),
        since_step=int(data["since_step"]),
        since_ns=int(data["since_ns"]),
        inhibited_by=str(data["inhibited_by"]),
        revised=bool(data.get("revised", False)),
    )


def location_of(result: Replayed | Failed) -> str:
    """The location of the run."""
    return result.location if isinstance(result, Failed) else result.outcome.location


def _run(outcome: BacktestOutcome, findings: int) -> dict[str, Any]:
    return {
        "location": outcome.location,
        "project": outcome.project,
        "run": outcome.run,
        "damaged": outcome.damaged,
        "attempts": [
            _attempt(attempt, RunName(outcome.project, outcome.run, attempt.attempt), findings)
            for attempt in outcome.attempts
        ],
    }


def _attempt(attempt: AttemptOutcome, name: RunName, findings: int) -> dict[str, Any]:
    return {
        "attempt": attempt.attempt,
        "order": attempt.order.value,
        "notes": list(attempt.notes),
        "rows": attempt.rows,
        "rules": [_outcome(outcome, name, findings) for outcome in attempt.outcomes],
    }


def _outcome(outcome: ReplayOutcome, name: RunName, findings: int) -> dict[str, Any]:
    return {
        "rule_config": outcome.config.as_data(),
        "health": outcome.health.value,
        "problem": outcome.problem,
        "found": outcome.found,
        "findings": [json.loads(finding.model_dump_json()) for finding in outcome.findings[:findings]],
        "transitions": [_transition(outcome.config, change, name) for change in outcome.transitions],
    }


def _transition(config: RuleConfig, change: Transition, name: RunName) -> dict[str, Any]:
    return {
        "phase": change.phase.value,
        "step": change.step,
        "since_step": change.since_step,
        "since_ns": change.since_ns,
        "inhibited_by": change.inhibited_by,
        "revised": change.revised,
        "message": event_message(config, change, name) if change.finding else "",
        "finding": json.loads(change.finding.model_dump_json()) if change.finding else None,
    }


def _variation(place: int, variation: Variation, tested: Sequence[Replayed]) -> dict[str, Any]:
    fired = [(result.outcome.location, result.fired[place]) for result in tested]
    return {
        "settings": {
            f"{setting.config}.{setting.parameter}": setting.value for setting in variation.settings
        },
        "current": variation.current,
        "fired": [{"location": location, **vars(first)} for location, first in fired if first is not None],
    }
