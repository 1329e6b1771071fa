"""What a detector's report is worth: recall, precision, alarms on healthy runs, delay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from benchmarks.detection.programs import Program

Alarms = list[tuple[int, str]]
Report = dict[str, dict[str, Alarms]]

SYMPTOMS = (
    "vanishing_gradient",
    "exploding_gradient",
    "nan_or_inf",
    "dead_relu",
    "saturated_activation",
    "poor_initialization",
    "loss_not_decreasing",
    "weight_not_updating",
    "overfit",
    "class_imbalance",
    "oscillating_loss",
    "slow_convergence",
)
"""Ids that name a training fault. Of other rules only what they say of healthy runs counts."""


@dataclass
class Tally:
    """One symptom's counts. ``late`` are steps from onset to report, of those found."""

    found: int = 0
    missed: int = 0
    false: int = 0
    late: list[int] = field(default_factory=list)

    @property
    def precision(self) -> float | None:
        """Share of reports that were right; None where there were none."""
        reported = self.found + self.false
        return self.found / reported if reported else None


@dataclass(frozen=True)
class Score:
    """All counts.

    Attributes:
        symptoms: by symptom.
        healthy_runs: how many were healthy.
        healthy_alarms: alarms in them, each rule once a run.
        flagged: healthy runs with any alarm.
        delays: of faulty runs with a right report, steps from onset to the first of them.
        faulty_runs: how many were faulty.
    """

    symptoms: Mapping[str, Tally]
    healthy_runs: int
    healthy_alarms: int
    flagged: int
    delays: list[int]
    faulty_runs: int

    @property
    def recall(self) -> float:
        """Share of symptoms that were reported, over all runs."""
        found = sum(tally.found for tally in self.symptoms.values())
        return found / max(1, found + sum(tally.missed for tally in self.symptoms.values()))

    @property
    def precision(self) -> float:
        """Share of reports that were right, over all runs."""
        found = sum(tally.found for tally in self.symptoms.values())
        return found / max(1, found + sum(tally.false for tally in self.symptoms.values()))

    @property
    def f1(self) -> float:
        """Harmonic mean of recall and precision."""
        return 2 * self.recall * self.precision / max(1e-9, self.recall + self.precision)

    @property
    def alarms_per_healthy_run(self) -> float:
        """Different rules that fired, a run."""
        return self.healthy_alarms / max(1, self.healthy_runs)

    @property
    def median_delay(self) -> float | None:
        """Steps; None where nothing was found."""
        return median(self.delays) if self.delays else None


def score(report: Report, programs: Mapping[str, Program]) -> Score:
    """Hold a report against what is wrong with the programs.

    A symptom counts as found when its first report is at or after the onset; anything reported that is neither a
    program's truth nor among ``also`` is a false alarm, and on a healthy run everything is.
    """
    tallies = {name: Tally() for name in SYMPTOMS}
    healthy = alarms = flagged = faulty = 0
    delays: list[int] = []
    for name, seeds in report.items():
        program = programs[name]
        for raised in seeds.values():
            first: dict[str, int] = {}
            for step, symptom in raised:
                first[symptom] = min(step, first.get(symptom, step))
            if program.kind == "faulty":
                faulty += 1
                late = _faulty(program, first, tallies)
                delays.extend([min(late)] if late else [])
                continue
            healthy, alarms, flagged = healthy + 1, alarms + len(first), flagged + bool(first)
            for symptom in first:
                if symptom in tallies:
                    tallies[symptom].false += 1
    return Score(tallies, healthy, alarms, flagged, delays, faulty)


def _faulty(program: Program, first: Mapping[str, int], tallies: Mapping[str, Tally]) -> list[int]:
    late = []
    for symptom in program.truth:
        if symptom in first and first[symptom] >= program.onset:
            tallies[symptom].found += 1
            late.append(first[symptom] - program.onset)
            tallies[symptom].late.append(late[-1])
        else:
            tallies[symptom].missed += 1
    for symptom in first:
        if symptom in tallies and symptom not in program.truth | program.also:
            tallies[symptom].false += 1
    return late
