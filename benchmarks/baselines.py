"""False alarms of ``unlike_earlier_runs``: ``python -m benchmarks.baselines [--programs N] [--only NAME …] [--fresh SEED …]``.

Each healthy program of the part ``tune`` is trained with five earlier seeds, whose summaries make a baseline as in the service,
and with fresh seeds, which the rule judges with that baseline. Every alarm is false: only the seed differs. Earlier runs for
which a default rule raises an alert are not sound and do not count, as in the service. A program
with fewer than five sound runs has no baseline; it is named and left out of the rate.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.detection.own import part_of, programs
from benchmarks.detection.recording import record
from benchmarks.report import Figure, Report, arguments
from watchstep import open_run
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.baseline import summarize_run
from watchstep_rules.builtin.tensors.unlike_earlier_runs import UnlikeEarlierRuns
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.signals.baseline import MIN_RUNS, Baseline, BaselineRun, merge_summaries

STEP_SECONDS = 0.001
EARLIER_SEEDS = (0, 1, 2, 3, 4)
FRESH_SEEDS = (5,)
PROGRAMS = 6
QUICK_STEPS = 100


@dataclass(frozen=True)
class Judged:
    """The fresh runs of a program.

    Attributes:
        program: its name.
        sound: how many of the earlier runs are sound.
        alarms: for each fresh run the message of each alert; empty where there is no baseline.
    """

    program: str
    sound: int
    alarms: tuple[tuple[str, ...], ...]


def fired(url: str, configs: list[RuleConfig]) -> list[tuple[str, str]]:
    """Severity and message of each alert that rules raise about a recorded run.

    Raises:
        RuntimeError: a rule could not be evaluated.
    """
    alerts = []
    for outcome in backtest(open_run(url).rows(), configs):
        if outcome.problem:
            raise RuntimeError(f"{url}: {outcome.config.name}: {outcome.problem}")
        alerts += [
            (str(outcome.config.severity), change.finding.message if change.finding else "")
            for change in outcome.fired
        ]
    return alerts


def judged(task: tuple[str, tuple[int, ...], int | None]) -> Judged:
    """Train a program with the earlier seeds and the fresh seeds, and judge the fresh runs."""
    name, fresh, most_steps = task
    program = programs()[name]
    others = [config for config in DEFAULT_RULES if config.rule != UnlikeEarlierRuns.name]
    with tempfile.TemporaryDirectory() as folder:
        summaries: dict[str, BaselineRun] = {}
        for seed in EARLIER_SEEDS:
            url = record(program, seed, Path(folder), STEP_SECONDS, most_steps)
            if not fired(url, others):
                summaries[str(seed)] = summarize_run(open_run(url))
        baseline = merge_summaries(summaries)
        if baseline is None:
            return Judged(name, len(summaries), ())
        rules = [compared_with(baseline)]
        alarms = tuple(
            tuple(
                message
                for _, message in fired(record(program, seed, Path(folder), STEP_SECONDS, most_steps), rules)
            )
            for seed in fresh
        )
        return Judged(name, len(summaries), alarms)


def compared_with(baseline: Baseline) -> RuleConfig:
    """The default rule config of `unlike_earlier_runs` with a baseline."""
    config = next(config for config in DEFAULT_RULES if config.rule == UnlikeEarlierRuns.name)
    return config.model_copy(
        update={"params": {**config.params, "baseline": baseline.model_dump(mode="json")}}
    )


def interval(hits: int, runs: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson interval of a share, 95 % unless told otherwise."""
    share, spread = hits / runs, z * z / runs
    centre = (share + spread / 2) / (1 + spread)
    width = z * math.sqrt(share * (1 - share) / runs + spread / (4 * runs)) / (1 + spread)
    return max(0.0, centre - width), min(1.0, centre + width)


def main() -> None:
    """Run it."""
    parser = arguments(__doc__ or "")
    parser.prog = "python -m benchmarks.baselines"
    parser.add_argument("--programs", type=int, default=PROGRAMS, help="so many programs, by name")
    parser.add_argument("--only", nargs="+", help="these programs only")
    parser.add_argument("--fresh", type=int, nargs="+", default=FRESH_SEEDS, help="seeds of fresh runs")
    given = parser.parse_args()
    healthy = sorted(n for n, p in programs().items() if p.kind == "healthy" and part_of(n) == "tune")
    if unknown := set(given.only or ()) - set(healthy):
        parser.error(f"--only: no healthy program of the part tune is named {', '.join(sorted(unknown))}")
    if again := set(given.fresh) & set(EARLIER_SEEDS):
        parser.error(f"--fresh: seeds of the baseline: {', '.join(map(str, sorted(again)))}")
    chosen = given.only or healthy[: 1 if given.quick else given.programs]
    steps = QUICK_STEPS if given.quick else None
    figures = Report("Baselines", quick=given.quick)
    with multiprocessing.get_context("spawn").Pool() as pool:
        results = pool.map(judged, [(name, tuple(given.fresh), steps) for name in chosen], chunksize=1)
    runs = [(result.program, alarms) for result in results for alarms in result.alarms]
    for result in results:
        if result.sound < MIN_RUNS:
            figures.remark(f"{result.program}: no baseline, {result.sound} sound earlier runs")
    for name, alarms in runs:
        for message in alarms:
            figures.remark(f"{name}: {message}")
    if runs:
        hits = sum(bool(alarms) for _, alarms in runs)
        low, high = interval(hits, len(runs))
        note = f"{hits} of {len(runs)} fresh runs; 95 % interval {low:.2f} to {high:.2f}"
        figures.add("share of healthy runs with an alarm", Figure(hits / len(runs), "", note=note))
        total = sum(len(alarms) for _, alarms in runs)
        figures.add("alarms a healthy run", Figure(total / len(runs), ""))
    figures.finish(given.json)


if __name__ == "__main__":
    main()
