"""Scores of a report that was made by hand."""

import pytest

from benchmarks.detection.figures import add_own, by_rule
from benchmarks.detection.programs import Clock, Program, Recorder
from benchmarks.detection.scoring import Report, score
from benchmarks.report import Report as Figures


def train(recorder: Recorder, seed: int, clock: Clock) -> None:
    """Nothing: these are only scored."""


PROGRAMS = {
    "late": Program(
        "late", train, "faulty", frozenset({"nan_or_inf", "dead_relu"}), frozenset({"overfit"}), onset=50
    ),
    "late.fixed": Program("late.fixed", train, "fixed"),
    "odd": Program("odd", train, "healthy"),
}
REPORT: Report = {
    "late": {
        "0": [(60, "nan_or_inf"), (80, "nan_or_inf"), (55, "overfit"), (70, "oscillating_loss")],
        "1": [(40, "nan_or_inf"), (75, "dead_relu"), (90, "a_rule_of_other_things")],
    },
    "late.fixed": {"0": [], "1": [(10, "vanishing_gradient"), (30, "vanishing_gradient")]},
    "odd": {"0": [(5, "a_rule_of_other_things"), (6, "overfit")]},
}


def test_found_missed_and_false() -> None:
    tallies = score(REPORT, PROGRAMS).symptoms
    nan, dead = tallies["nan_or_inf"], tallies["dead_relu"]
    assert (nan.found, nan.missed, nan.false, nan.late) == (1, 1, 0, [10])
    assert (dead.found, dead.missed, dead.false, dead.late) == (1, 1, 0, [25])
    assert {name: tally.false for name, tally in tallies.items() if tally.false} == {
        "oscillating_loss": 1,
        "vanishing_gradient": 1,
        "overfit": 1,
    }
    assert nan.precision == 1.0
    assert tallies["overfit"].precision == 0.0
    assert tallies["class_imbalance"].precision is None


def test_the_whole() -> None:
    held = score(REPORT, PROGRAMS)
    assert held.recall == pytest.approx(2 / 4)
    assert held.precision == pytest.approx(2 / 5)
    assert held.f1 == pytest.approx(4 / 9)
    assert (held.healthy_runs, held.healthy_alarms, held.flagged) == (3, 3, 2)
    assert held.alarms_per_healthy_run == pytest.approx(1.0)
    assert held.median_delay == pytest.approx(17.5)


def test_healthy_runs_say_which_rules_fired_once_a_run() -> None:
    assert by_rule({"late.fixed": REPORT["late.fixed"]}) == "vanishing_gradient 1"
    assert by_rule({}) == "none"


def test_figures_tell_twins_and_healthy_trainings_apart() -> None:
    figures = Figures("Detection")
    add_own(figures, REPORT, PROGRAMS)
    assert figures.figures["held_out/recall"].target is not None
    assert figures.figures["held_out/alarms, mended twins"].value == pytest.approx(0.5)
    assert figures.figures["held_out/alarms, longer healthy trainings"].value == pytest.approx(2.0)
    assert "tune/recall" not in figures.figures
