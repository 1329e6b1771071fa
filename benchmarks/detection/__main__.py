"""Detection: ``python -m benchmarks.detection --cases FILE --seeds 100 101 … [--out report.json] [--json FILE]``.

Each program of FILE is trained once a seed with the shipped default capture, and judged by the default rules. The
report has the form ``{program: {seed: [[step, rule], …]}}``: one entry for each alert that fires.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.detection.detecting import detect
from benchmarks.detection.programs import load
from benchmarks.detection.scoring import Score, score
from benchmarks.report import Figure
from benchmarks.report import Report as Figures

STEP_SECONDS = 0.001
SLOW_STEP_SECONDS = 0.02
TARGETS = {"recall": 0.90, "f1": 0.90, "alarms": 0.05, "delay": 10.0}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection", description=__doc__)
    parser.add_argument("--cases", type=Path, required=True, help="a Python file with CASES")
    parser.add_argument("--seeds", type=int, nargs="+", default=[100], help="one training for each")
    parser.add_argument("--only", nargs="+", help="these programs only")
    parser.add_argument("--out", type=Path, help="write the report here, as the scorer reads it")
    parser.add_argument("--json", type=Path, help="write figures, machine and versions here")
    parser.add_argument("--fast-only", action="store_true", help="leave out the run with slow steps")
    return parser.parse_args()


def add_figures(figures: Figures, title: str, held: Score, *, targets: bool) -> None:
    """The figures of one run over all programs."""
    aims = TARGETS if targets else {}
    note = f"{held.faulty_runs} faulty and {held.healthy_runs} healthy runs"
    figures.add(f"{title}/recall", Figure(held.recall, "ratio", aims.get("recall"), "at least", note))
    figures.add(f"{title}/precision", Figure(held.precision, "ratio"))
    figures.add(f"{title}/f1", Figure(held.f1, "ratio", aims.get("f1"), "at least"))
    alarms = f"{held.flagged} healthy runs with an alarm"
    figures.add(
        f"{title}/alarms",
        Figure(held.alarms_per_healthy_run, "a healthy run", aims.get("alarms"), note=alarms),
    )
    figures.add(f"{title}/delay", Figure(held.median_delay, "steps, median", aims.get("delay")))
    for name, tally in held.symptoms.items():
        seen = f"found {tally.found} of {tally.found + tally.missed}, {tally.false} false"
        recall = tally.found / (tally.found + tally.missed) if tally.found + tally.missed else None
        figures.add(f"{title}/{name}", Figure(recall, "recall", note=seen))


def main() -> None:
    """Run it."""
    given = arguments()
    programs = load(given.cases)
    chosen = given.only or list(programs)
    figures = Figures("Detection")
    fast = detect(given.cases, chosen, given.seeds, STEP_SECONDS)
    add_figures(figures, "steps of 1 ms", score(fast, programs), targets=True)
    if not given.fast_only:
        slow = detect(given.cases, chosen, given.seeds, SLOW_STEP_SECONDS)
        add_figures(figures, "steps of 20 ms", score(slow, programs), targets=False)
    if given.out:
        given.out.write_text(json.dumps(fast))
    figures.finish(given.json)


if __name__ == "__main__":
    main()
