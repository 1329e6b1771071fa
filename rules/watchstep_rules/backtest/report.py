"""What a backtest found as data, for files and the API."""

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
from watchstep_rules.engine.explanation import RunName, say
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.rule import Finding

SCHEMA_VERSION = 1


def report(
    results: Iterable[Replayed | Failed], variations: Sequence[Variation], findings: int = 100
) -> dict[str, Any]:
    """All results, by the runs' locations.

    Args:
        results: as `watchstep_rules.backtest.backtest.backtest_many` gives them.
        variations: of the sweeps.
        findings: so many of each rule config on each attempt are listed; the rest are counted.
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
    """What `report` was given; of variations their settings alone.

    Raises:
        ValueError, KeyError, TypeError: it is no report.
    """
    results = [result_from_data(held) for held in (*data["runs"], *data["failed"])]
    varied = [
        Variation(
            tuple(_setting(name, value) for name, value in held["settings"].items()),
            bool(held["current"]),
            (),
        )
        for held in data["sweep"]
    ]
    return sorted(results, key=location_of), varied


def _setting(name: str, value: Any) -> Setting:
    config, _, parameter = name.rpartition(".")
    return Setting(config, parameter, value)


def result_as_data(result: Replayed | Failed, findings: int = 100) -> dict[str, Any]:
    """One run's result; so many findings of each rule config on each attempt."""
    if isinstance(result, Failed):
        return {"location": result.location, "what": result.what, "hint": result.hint}
    fired = [None if first is None else vars(first) for first in result.fired]
    return {**_run(result.outcome, findings), "fired": fired}


def result_from_data(held: dict[str, Any]) -> Replayed | Failed:
    """What `result_as_data` was given, with as many findings.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    if "what" in held:
        return Failed(str(held["location"]), str(held["what"]), str(held["hint"]))
    attempts = [
        AttemptOutcome(
            str(attempt["attempt"]),
            JudgingOrder(attempt["order"]),
            tuple(map(str, attempt["notes"])),
            int(attempt["rows"]),
            [_outcome_from(one) for one in attempt["rules"]],
        )
        for attempt in held["attempts"]
    ]
    outcome = BacktestOutcome(
        str(held["location"]), str(held["project"]), str(held["run"]), attempts, dict(held["damaged"])
    )
    return Replayed(outcome, tuple(None if first is None else FirstAlert(**first) for first in held["fired"]))


def _outcome_from(held: dict[str, Any]) -> ReplayOutcome:
    return ReplayOutcome(
        RuleConfig.model_validate(held["rule_config"]),
        [Finding.model_validate(finding) for finding in held["findings"]],
        int(held["found"]),
        [_transition_from(change) for change in held["transitions"]],
        RuleHealth(held["health"]),
        str(held["problem"]),
    )


def _transition_from(held: dict[str, Any]) -> Transition:
    return Transition(
        phase=Phase(held["phase"]),
        step=int(held["step"]),
        finding=None if held["finding"] is None else Finding.model_validate(held["finding"]),
        since_step=int(held["since_step"]),
        since_ns=int(held["since_ns"]),
        inhibited_by=str(held["inhibited_by"]),
        revised=bool(held.get("revised", False)),
    )


def location_of(result: Replayed | Failed) -> str:
    """Of the run."""
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
        "message": say(config, change, name) if change.finding else "",
        "finding": json.loads(change.finding.model_dump_json()) if change.finding else None,
    }


def _variation(place: int, variation: Variation, tested: Sequence[Replayed]) -> dict[str, Any]:
    fired = [(result.outcome.location, result.fired[place]) for result in tested]
    return {
        "settings": {f"{one.config}.{one.parameter}": one.value for one in variation.settings},
        "current": variation.current,
        "fired": [{"location": location, **vars(first)} for location, first in fired if first is not None],
    }
