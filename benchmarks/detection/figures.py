"""Scores as figures beside their targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median

from benchmarks.detection.own import part_of
from benchmarks.detection.programs import Program
from benchmarks.detection.scoring import Report, Score, score
from benchmarks.report import Figure
from benchmarks.report import Report as Figures

TARGETS = {"recall": 0.90, "f1": 0.90, "alarms": 0.05, "delay": 10.0}


def add_figures(figures: Figures, title: str, held: Score, *, targets: bool) -> None:
    """The figures of one run over programs."""
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
        due = tally.found + tally.missed
        late = f", {median(tally.late):g} steps late" if tally.late else ""
        precision = f", precision {tally.precision:.2f}" if tally.precision is not None else ""
        note = f"found {tally.found} of {due}, {tally.false} false{precision}{late}"
        figures.add(f"{title}/{name}", Figure(tally.found / due if due else None, "recall", note=note))


def add_own(figures: Figures, report: Report, programs: Mapping[str, Program]) -> None:
    """The figures of the own set: what is held out with targets, the rest beside it, and healthy trainings apart."""
    for part in ("held_out", "tune"):
        held = {name: seeds for name, seeds in report.items() if part_of(name) == part}
        if not held:
            continue
        add_figures(figures, part, score(held, programs), targets=part == "held_out")
        for kind, words in (("fixed", "mended twins"), ("healthy", "longer healthy trainings")):
            own = {name: seeds for name, seeds in held.items() if programs[name].kind == kind}
            counted = score(own, programs)
            figures.add(
                f"{part}/alarms, {words}",
                Figure(
                    counted.alarms_per_healthy_run if own else None,
                    "a run",
                    note=f"{counted.flagged} of {counted.healthy_runs} flagged: {by_rule(own)}",
                ),
            )


def by_rule(report: Report) -> str:
    """Which rules fired in how many runs, the most frequent first."""
    fired = Counter(
        rule
        for seeds in report.values()
        for raised in seeds.values()
        for rule in {rule for _, rule in raised}
    )
    return ", ".join(f"{rule} {count}" for rule, count in fired.most_common()) or "none"
