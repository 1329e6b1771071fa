"""Programs recorded and judged, on all cores."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.detection.programs import Program, load
from benchmarks.detection.recording import record
from benchmarks.detection.scoring import Alarms, Report
from watchstep import open_run
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.config.defaults import DEFAULT_RULES


@dataclass(frozen=True)
class Task:
    """One training to record and judge. ``cases`` is a file of programs, None for the project's own."""

    cases: Path | None
    program: str
    seed: int
    step_seconds: float
    folder: Path
    most_steps: int | None = None


def programs_of(cases: Path | None) -> dict[str, Program]:
    """The programs of a file, or the project's own."""
    if cases is not None:
        return load(cases)
    from benchmarks.detection.own import programs

    return programs()


def alarms_of(task: Task) -> Alarms:
    """Record, judge, and say which rules fired at which step."""
    program = programs_of(task.cases)[task.program]
    return judged(record(program, task.seed, task.folder, task.step_seconds, task.most_steps))


def judged(url: str) -> Alarms:
    """What the default rules say of a recorded run."""
    outcomes = backtest(open_run(url).rows(), DEFAULT_RULES)
    for outcome in outcomes:
        if outcome.problem:
            raise RuntimeError(f"{url}: {outcome.config.name}: {outcome.problem}")
    return sorted((fired.step, outcome.config.rule) for outcome in outcomes for fired in outcome.fired)


def detect(
    cases: Path | None,
    programs: Sequence[str],
    seeds: Sequence[int],
    step_seconds: float,
    *,
    most_steps: int | None = None,
    done: Callable[[int, int], None] = lambda _done, _all: None,
) -> Report:
    """The report over programs and seeds, on all cores.

    Args:
        cases: a file of programs; None for the project's own.
        programs: by id.
        seeds: one training for each.
        step_seconds: what a step takes by the fixed clock.
        most_steps: end trainings after so many.
        done: told after each training, how many are done of how many.
    """
    report: Report = {program: {} for program in programs}
    with tempfile.TemporaryDirectory() as folder:
        tasks = [
            Task(cases, program, seed, step_seconds, Path(folder), most_steps)
            for program in programs
            for seed in seeds
        ]
        with multiprocessing.get_context("spawn").Pool() as pool:
            for number, (task, alarms) in enumerate(zip(tasks, pool.imap(alarms_of, tasks), strict=True), 1):
                report[task.program][str(task.seed)] = alarms
                done(number, len(tasks))
    return report
