"""Backtests: what rules would have reported on a finished run, when, and where.

With the journal of a service, an attempt is judged as it was judged live: the same rows in the same order, with the same watermarks
and ticks, and therefore with the same findings. Without a journal, rows are judged in the order of their steps, as if no worker had
been late. Rules are split invariant, so a service without late workers gives the same result.

`backtest_many` runs the backtests of many runs, each in its own process. A failed backtest does not stop the others.

Results of backtests as JSON data, for files and the API.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from watchstep.errors import WatchstepError
from watchstep.format.block import Block
from watchstep.reading.budget import OverBudgetError
from watchstep.reading.run import Run, open_run
from watchstep.store.store import Store
from watchstep_rules.backtest.replay import (
    Arrival,
    OrderLostError,
    Recorded,
    Replay,
    ReplayOutcome,
    arrivals_by_steps,
    arrivals_of_journal,
    in_parts,
    recorded_attempts,
)
from watchstep_rules.backtest.sweep import Setting, Variation
from watchstep_rules.baseline import configs_of_attempt
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase, Transition
from watchstep_rules.engine.incident import RunName, event_message
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.engine.saved_tensors import SavedTensors
from watchstep_rules.references import (
    references_of,
    saved_tensors_of,
    with_references,
)
from watchstep_rules.rule import Finding

__all__ = [
    "AttemptOutcome",
    "BacktestOutcome",
    "JudgingOrder",
    "ReplayOutcome",
    "backtest",
    "backtest_run",
    "backtest_sets",
]


class JudgingOrder(str, Enum):
    """The order in which rows are evaluated: as in the service's journal, or by step with all workers at once."""

    JOURNAL = "journal"
    STEPS = "steps"


@dataclass(frozen=True)
class AttemptOutcome:
    """The results of rule configs on one attempt.

    Attributes:
        attempt: the name of the attempt.
        order: the order in which rows were evaluated.
        notes: reasons why a live run may have given other results.
        rows: number of rows that were evaluated.
        outcomes: one outcome for each rule config, in their order.
    """

    attempt: str
    order: JudgingOrder
    notes: tuple[str, ...]
    rows: int
    outcomes: list[ReplayOutcome]


@dataclass(frozen=True)
class BacktestOutcome:
    """The results of rule configs on a run.

    Attributes:
        location: the path or URL of the run.
        project: the project of the run.
        run: the id of the run.
        attempts: outcomes of the attempts, oldest first.
        damaged: segments that could not be read, and why.
    """

    location: str
    project: str
    run: str
    attempts: list[AttemptOutcome]
    damaged: dict[str, str] = field(default_factory=dict)


def backtest(
    rows: Block, configs: Sequence[RuleConfig], saved: Callable[[], SavedTensors] | None = None
) -> list[ReplayOutcome]:
    """Evaluate all rows of one attempt at once; all findings are kept.

    Args:
        rows: the rows in canonical order, as `watchstep.Run.rows` returns them.
        configs: the rule configs.
        saved: returns a reader of full tensors, as for `Replay`; by default they cannot be read.
    """
    replay = Replay([configs], sys.maxsize, saved)
    last = int(rows.step.max()) if len(rows) else -1
    for part, end in in_parts(rows, last):
        replay.evaluate(Arrival(int(rows.time_ns.max()) if len(rows) else 0, end, (part,)))
    return replay.outcomes()[0]


def backtest_run(run: str | os.PathLike[str] | Run, configs: Sequence[RuleConfig]) -> BacktestOutcome:
    """Evaluate rule configs on each attempt of a run; rows are read in parts.

    Args:
        run: a location as for `watchstep.open_run`, or an open run.
        configs: the rule configs.

    Raises:
        NotFoundError: the run does not exist.
        OverBudgetError: a step has too many rows, or the rules look back to too many.
        StoreError: the store cannot be read.
    """
    return backtest_sets(run, [configs])[0]


def backtest_sets(
    run: str | os.PathLike[str] | Run,
    rule_sets: Sequence[Sequence[RuleConfig]],
    check_running: Callable[[], None] | None = None,
) -> list[BacktestOutcome]:
    """Evaluate several sets of rule configs on each attempt of a run; rows are read once.

    Args:
        run: a location as for `watchstep.open_run`, or an open run.
        rule_sets: sets of rule configs; each is evaluated like the rules of a run.
        check_running: is called before each rule config of each evaluation; an exception that it raises ends the backtest.

    Returns:
        An outcome for each set.

    Raises:
        NotFoundError, OverBudgetError, StoreError: as for `backtest_run`.
    """
    opened = run if isinstance(run, Run) else open_run(run)
    judged = [
        _attempt(recorded, rule_sets, check_running) for recorded in recorded_attempts(opened, opened.store)
    ]
    document = opened.document
    return [
        BacktestOutcome(
            opened.location,
            document.project,
            document.run,
            [attempt[place] for attempt in judged],
            opened.damaged,
        )
        for place in range(len(rule_sets))
    ]


def _attempt(
    recorded: Recorded,
    rule_sets: Sequence[Sequence[RuleConfig]],
    check_running: Callable[[], None] | None,
) -> list[AttemptOutcome]:
    """The outcomes of each set. If the journal cannot be replayed to its end, the attempt is evaluated again without it."""
    pinned = [configs_of_attempt(rule_set, recorded.store, recorded.attempt) for rule_set in rule_sets]
    compared = [config for rule_set in rule_sets for config in rule_set]
    references, notes = references_of(recorded.store, recorded.attempt, compared)
    sets = [with_references(configs, references) for configs, _ in pinned]

    def begun() -> Replay:
        return Replay(
            sets,
            saved=lambda: saved_tensors_of(recorded.store, recorded.attempt, references),
            check_running=check_running,
        )

    replay, order = begun(), JudgingOrder.JOURNAL
    try:
        for arrival in arrivals_of_journal(recorded, notes):
            replay.evaluate(arrival)
    except (OrderLostError, OverBudgetError) as error:
        notes, replay, order = [*notes, error.what], begun(), JudgingOrder.STEPS
        for arrival in arrivals_by_steps(recorded):
            replay.evaluate(arrival)
    notes += list(dict.fromkeys(problem for _, problem in pinned if problem))
    return [
        AttemptOutcome(recorded.attempt, order, tuple(notes), replay.rows, outcomes)
        for outcomes in replay.outcomes()
    ]


@dataclass(frozen=True)
class FirstAlert:
    """The first firing of an alert in a variation.

    Attributes:
        attempt: the attempt.
        step: the step.
        config: the rule config.
        tensor: the tensor; empty for the run as a whole.
    """

    attempt: str
    step: int
    config: str
    tensor: str


@dataclass(frozen=True)
class Replayed:
    """A run that was evaluated.

    Attributes:
        outcome: the outcome of the rules as they are.
        fired: the first firing of each variation that was not inhibited; None if there was none.
        was_right: answers of people to whether the live alert of a rule config on this run was right: ``yes``, ``no`` or ``not_sure``, by
            the name of the rule config.
    """

    outcome: BacktestOutcome
    fired: tuple[FirstAlert | None, ...]
    was_right: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """A run that could not be evaluated: the error and a hint."""

    location: str
    what: str
    hint: str


@dataclass(frozen=True)
class Task:
    """What to evaluate on each run.

    Attributes:
        configs: the rules as they are.
        variations: further sets of rule configs.
    """

    configs: tuple[RuleConfig, ...]
    variations: tuple[Variation, ...] = ()


def backtest_many(
    locations: Sequence[str], task: Task, jobs: int | None = None
) -> Iterator[Replayed | Failed]:
    """Run the backtests of many runs; yields each result when it is complete.

    Args:
        locations: locations of the runs, as for `watchstep.open_run`.
        task: what to evaluate.
        jobs: number of processes; the number of cores by default. With 1, backtests run in this process.
    """
    processes = min(jobs or os.cpu_count() or 1, len(locations))
    if processes <= 1:
        yield from (judge_run(location, task) for location in locations)
        return
    # A new interpreter: threads of the reading libraries do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = {pool.submit(judge_run, location, task): location for location in locations}
        for done in as_completed(waiting):
            yield _result(done, waiting[done])


def judge_run(
    location: str,
    task: Task,
    store: Store | None = None,
    check_running: Callable[[], None] | None = None,
) -> Replayed | Failed:
    """Run the backtest of one run.

    Args:
        location: the location of the run, as for `watchstep.open_run`.
        task: what to evaluate.
        store: the store, rooted at the run; by default it is opened by its location.
        check_running: is called before each rule config of each evaluation; a `WatchstepError` that it raises is the result.
    """
    try:
        sets = [task.configs, *(variation.configs for variation in task.variations)]
        outcomes = backtest_sets(location if store is None else open_run(store), sets, check_running)
    except WatchstepError as error:
        return Failed(location, error.what, error.hint)
    except Exception as error:  # noqa: BLE001 - reported with the run's name; other runs continue
        return Failed(location, f"run {location}: {type(error).__name__}: {error}", "report this as a bug")
    damaged = outcomes[0].damaged
    if damaged and not any(attempt.rows for attempt in outcomes[0].attempts):
        segment, why = next(iter(damaged.items()))
        what = f"run {location}: none of its {len(damaged)} segments can be read; {segment}: {why}"
        return Failed(location, what, "restore its segments, or exclude the run")
    fired = [
        _first(outcome, variation) for outcome, variation in zip(outcomes[1:], task.variations, strict=True)
    ]
    return Replayed(outcomes[0], tuple(fired))


def _result(done: Future[Replayed | Failed], location: str) -> Replayed | Failed:
    try:
        return done.result()
    except BrokenProcessPool:
        return Failed(
            location,
            f"run {location}: a backtest process died",
            "use fewer --jobs: the machine may be out of memory",
        )


def _first(outcome: BacktestOutcome, variation: Variation) -> FirstAlert | None:
    for attempt in outcome.attempts:
        alerts = [
            FirstAlert(
                attempt.attempt,
                change.step,
                rule.config.name,
                change.finding.tensor if change.finding else "",
            )
            for rule in attempt.outcomes
            if rule.config.name in variation.judged
            for change in rule.fired
            if not change.inhibited_by
        ]
        if alerts:
            return min(alerts, key=lambda alert: alert.step)
    return None


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
    return {**_run(result.outcome, findings), "fired": fired, "was_right": dict(result.was_right)}


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
    fired = tuple(None if first is None else FirstAlert(**first) for first in data["fired"])
    return Replayed(outcome, fired, {str(name): str(answer) for name, answer in data["was_right"].items()})


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
        loaded_at=data.get("loaded_at"),
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
            _attempt_data(attempt, RunName(outcome.project, outcome.run, attempt.attempt), findings)
            for attempt in outcome.attempts
        ],
    }


def _attempt_data(attempt: AttemptOutcome, name: RunName, findings: int) -> dict[str, Any]:
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
        "loaded_at": change.loaded_at,
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
