"""Rules over a finished run: what would have fired, when, and where.

With the journal that a service left, an attempt is judged as it was judged live: the same rows in the same order, with
the same seals and ticks, and so with the same findings. Without one, rows are judged in the order of their steps, as if
no worker had been late; rules are split invariant, so that this is what a service without late workers would have said.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from watchstep.format.block import Block
from watchstep.reading.run import Run, open_run
from watchstep_rules.backtest.replay import Arrival, Replay, ReplayOutcome
from watchstep_rules.backtest.replay_source import (
    OrderLostError,
    Recorded,
    arrivals_by_steps,
    arrivals_of_journal,
    recorded_attempts,
)
from watchstep_rules.baseline.pinned import configs_of_attempt
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
