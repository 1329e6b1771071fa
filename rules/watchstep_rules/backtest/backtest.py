"""Backtests: what rules would have reported on a finished run, when, and where.

With the journal of a service, an attempt is judged as it was judged live: the same rows in the same order, with the same watermarks
and ticks, and therefore with the same findings. Without a journal, rows are judged in the order of their steps, as if no worker had
been late. Rules are split invariant, so a service without late workers gives the same result.

`backtest_many` runs the backtests of many runs, each in its own process. A failed backtest does not stop the others.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from enum import Enum

from watchstep.errors import WatchstepError
from watchstep.format.block import Block
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
    recorded_attempts,
)
from watchstep_rules.backtest.sweep import Variation
from watchstep_rules.baseline import configs_of_attempt
from watchstep_rules.config.rule_config import RuleConfig

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
    """In which order rows were judged: as the service did, or by their steps, all workers at once."""

    JOURNAL = "journal"
    STEPS = "steps"


@dataclass(frozen=True)
class AttemptOutcome:
    """What rule configs say of one attempt.

    Attributes:
        attempt: its name.
        order: in which rows were judged.
        notes: what stands against this being what a live run would have said.
        rows: rows that were judged.
        outcomes: one for each rule config, in their order.
    """

    attempt: str
    order: JudgingOrder
    notes: tuple[str, ...]
    rows: int
    outcomes: list[ReplayOutcome]


@dataclass(frozen=True)
class BacktestOutcome:
    """What rule configs say of a run.

    Attributes:
        location: its path or URL.
        project: its project.
        run: its id.
        attempts: oldest first.
        damaged: segments that could not be read, and why.
    """

    location: str
    project: str
    run: str
    attempts: list[AttemptOutcome]
    damaged: dict[str, str] = field(default_factory=dict)


def backtest(rows: Block, configs: Sequence[RuleConfig]) -> list[ReplayOutcome]:
    """Judge all rows of one attempt at once; all findings are kept.

    Args:
        rows: in canonical order, as `watchstep.Run.rows` gives them.
        configs: the rule configs.
    """
    replay = Replay([configs], sys.maxsize)
    last = int(rows.step.max()) if len(rows) else -1
    replay.evaluate(Arrival(int(rows.time_ns.max()) if len(rows) else 0, last, (rows,)))
    return replay.outcomes()[0]


def backtest_run(run: str | os.PathLike[str] | Run, configs: Sequence[RuleConfig]) -> BacktestOutcome:
    """Judge each attempt of a run; rows are read a part at a time.

    Args:
        run: as `watchstep.open_run` takes it, or gives it.
        configs: the rule configs.

    Raises:
        NotFoundError: there is no run.
        StoreError: the store cannot be read.
    """
    return backtest_sets(run, [configs])[0]


def backtest_sets(
    run: str | os.PathLike[str] | Run, rule_sets: Sequence[Sequence[RuleConfig]]
) -> list[BacktestOutcome]:
    """Judge each attempt of a run by several sets of rule configs; rows are read once for all.

    Args:
        run: as of `backtest_run`.
        rule_sets: each as the rules of a run.

    Returns:
        An outcome for each set.

    Raises:
        NotFoundError, StoreError: as `backtest_run`.
    """
    opened = run if isinstance(run, Run) else open_run(run)
    judged = [_attempt(recorded, rule_sets) for recorded in recorded_attempts(opened, opened.store)]
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


def _attempt(recorded: Recorded, rule_sets: Sequence[Sequence[RuleConfig]]) -> list[AttemptOutcome]:
    """By each set. Where the journal does not lead to the end, all is judged anew without it."""
    pinned = [configs_of_attempt(rule_set, recorded.store, recorded.attempt) for rule_set in rule_sets]
    sets = [configs for configs, _ in pinned]
    notes: list[str] = []
    replay, order = Replay(sets), JudgingOrder.JOURNAL
    try:
        for arrival in arrivals_of_journal(recorded, notes):
            replay.evaluate(arrival)
    except OrderLostError as error:
        notes, replay, order = [error.what], Replay(sets), JudgingOrder.STEPS
        for arrival in arrivals_by_steps(recorded):
            replay.evaluate(arrival)
    notes += list(dict.fromkeys(problem for _, problem in pinned if problem))
    return [
        AttemptOutcome(recorded.attempt, order, tuple(notes), replay.rows, outcomes)
        for outcomes in replay.outcomes()
    ]


@dataclass(frozen=True)
class FirstAlert:
    """Where a variation's alert began to fire first.

    Attributes:
        attempt: in which attempt.
        step: at which step.
        config: which rule config.
        tensor: of which tensor; empty for the run as a whole.
    """

    attempt: str
    step: int
    config: str
    tensor: str


@dataclass(frozen=True)
class Replayed:
    """A run that was judged.

    Attributes:
        outcome: by the rules as they are.
        fired: of each variation where it fired first and told somebody; None where it did not.
    """

    outcome: BacktestOutcome
    fired: tuple[FirstAlert | None, ...]


@dataclass(frozen=True)
class Failed:
    """A run that could not be judged: the thing, and what to do about it."""

    location: str
    what: str
    hint: str


@dataclass(frozen=True)
class Task:
    """What is judged of each run.

    Attributes:
        configs: the rules as they are.
        variations: further sets.
    """

    configs: tuple[RuleConfig, ...]
    variations: tuple[Variation, ...] = ()


def backtest_many(
    locations: Sequence[str], task: Task, jobs: int | None = None
) -> Iterator[Replayed | Failed]:
    """Judge many runs; results come as they are ready.

    Args:
        locations: of the runs, as `watchstep.open_run` takes them.
        task: what is judged.
        jobs: processes; as many as there are cores where it is left out. One judges in this process.
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


def judge_run(location: str, task: Task, store: Store | None = None) -> Replayed | Failed:
    """Judge one run.

    Args:
        location: as `watchstep.open_run` takes it.
        task: what is judged.
        store: seen from the run, where it is not to be opened by its location.
    """
    try:
        sets = [task.configs, *(variation.configs for variation in task.variations)]
        outcomes = backtest_sets(location if store is None else open_run(store), sets)
    except WatchstepError as error:
        return Failed(location, error.what, error.hint)
    except Exception as error:  # noqa: BLE001 - told with the run's name; the others go on
        return Failed(location, f"run {location}: {type(error).__name__}: {error}", "report this as a bug")
    damaged = outcomes[0].damaged
    if damaged and not any(attempt.rows for attempt in outcomes[0].attempts):
        segment, why = next(iter(damaged.items()))
        what = f"run {location}: none of its {len(damaged)} segments can be read; {segment}: {why}"
        return Failed(location, what, "bring its segments back, or leave the run out")
    fired = [_first(outcome, one) for outcome, one in zip(outcomes[1:], task.variations, strict=True)]
    return Replayed(outcomes[0], tuple(fired))


def _result(done: Future[Replayed | Failed], location: str) -> Replayed | Failed:
    try:
        return done.result()
    except BrokenProcessPool:
        return Failed(
            location,
            f"run {location}: a process that judged runs died",
            "use fewer --jobs: memory may be short",
        )


def _first(outcome: BacktestOutcome, variation: Variation) -> FirstAlert | None:
    for attempt in outcome.attempts:
        seen = [
            FirstAlert(
                attempt.attempt,
                change.step,
                told.config.name,
                change.finding.tensor if change.finding else "",
            )
            for told in attempt.outcomes
            if told.config.name in variation.judged
            for change in told.fired
            if not change.inhibited_by
        ]
        if seen:
            return min(seen, key=lambda fired: fired.step)
    return None
