"""Backtests of many runs at once, each in a process of its own; one that fails stops no other."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from watchstep.errors import WatchstepError
from watchstep.reading.run import open_run
from watchstep.store.store import Store
from watchstep_rules.backtest.backtest import BacktestOutcome, backtest_sets
from watchstep_rules.backtest.sweep import Variation
from watchstep_rules.config.rule_config import RuleConfig


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
