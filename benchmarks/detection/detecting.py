"""Programs recorded and judged, on all cores."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.detection.programs import load
from benchmarks.detection.recording import record
from benchmarks.detection.scoring import Alarms, Report
from watchstep import open_run
from watchstep_rules.backtest import backtest
from watchstep_rules.defaults import DEFAULT_RULES


@dataclass(frozen=True)
class Task:
    """One training to record and judge."""

    cases: Path
    program: str
    seed: int
    step_seconds: float
    folder: Path


def alarms_of(task: Task) -> Alarms:
    """Record, judge, and say which rules fired at which step."""
    program = load(task.cases)[task.program]
    url = record(program, task.seed, task.folder, task.step_seconds)
    return judged(url)


def judged(url: str) -> Alarms:
    """What the default rules say of a recorded run."""
    outcomes = backtest(open_run(url).rows(), DEFAULT_RULES)
    for outcome in outcomes:
        if outcome.problem:
            raise RuntimeError(f"{url}: {outcome.config.name}: {outcome.problem}")
    return sorted((fired.step, outcome.config.rule) for outcome in outcomes for fired in outcome.fired)


def detect(cases: Path, programs: Sequence[str], seeds: Sequence[int], step_seconds: float) -> Report:
    """The report over programs and seeds, on all cores."""
    report: Report = {program: {} for program in programs}
    with tempfile.TemporaryDirectory() as folder:
        tasks = [
            Task(cases, program, seed, step_seconds, Path(folder)) for program in programs for seed in seeds
        ]
        with multiprocessing.get_context("spawn").Pool() as pool:
            for task, alarms in zip(tasks, pool.imap(alarms_of, tasks), strict=True):
                report[task.program][str(task.seed)] = alarms
    return report
