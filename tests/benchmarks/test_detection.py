"""Programs of the detection benchmark, their scores, and witnesses."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from benchmarks.detection.detecting import judged
from benchmarks.detection.figures import add_own, by_rule
from benchmarks.detection.fixed_clock import EnoughStepsError, FixedClock
from benchmarks.detection.healthy import PROGRAMS as HEALTHY
from benchmarks.detection.isolated import Alarm, Result, Task, run_here
from benchmarks.detection.oracle import SEEDS as ORACLE_SEEDS
from benchmarks.detection.other_frameworks import run
from benchmarks.detection.other_frameworks.program import BAD_BATCH, PROGRAMS, batches
from benchmarks.detection.other_frameworks.run import FrameworkRun, run_frameworks
from benchmarks.detection.own import TUNE, part_of, programs
from benchmarks.detection.programs import Clock, Program, Recorder
from benchmarks.detection.published import PROGRAMS as PUBLISHED
from benchmarks.detection.published.pairs import FIXED, MEASURED, measured
from benchmarks.detection.recording import record
from benchmarks.detection.run_witnessed import Chosen, programs_of, run_witnessed
from benchmarks.detection.scoring import SYMPTOMS, Report, score
from benchmarks.detection.witness import Witness
from benchmarks.detection.witnessed import (
    DIFFICULT,
    MID_RUN,
    SEEDS,
    Quality,
    Training,
    Witnessed,
    half_of,
    witnessed_programs,
)
from benchmarks.detection.witnessed_figures import counted, delay_of, lines
from benchmarks.report import Report as Figures
from watchstep import Hook, open_run
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.registry import RULES

# Programs


FAULTY = [name for name, program in PUBLISHED.items() if program.kind == "faulty"]
STEPS = 3


@pytest.mark.parametrize("name", programs())
def test_each_trains(name: str) -> None:
    witness = Witness()
    clock = FixedClock(0.001, STEPS)
    with pytest.raises(EnoughStepsError):
        programs()[name].train(witness, 0, clock)
    assert len(witness.seen.loss) == STEPS or name == "adversarial_moons"


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_program_has_a_twin_a_source_and_symptoms_that_are_scored(name: str) -> None:
    faulty, fixed = PUBLISHED[name], PUBLISHED[name + FIXED]
    assert faulty.source
    assert faulty.fault
    assert faulty.truth
    assert faulty.truth <= set(SYMPTOMS)
    assert faulty.also <= set(SYMPTOMS) - faulty.truth
    assert fixed.kind == "fixed"
    assert not fixed.truth


@pytest.mark.parametrize("name", FAULTY)
def test_the_oracle_saw_the_truth_of_every_seed(name: str) -> None:
    seen = measured_by_seed()[name]
    assert set(seen) == {str(seed) for seed in ORACLE_SEEDS}
    for symptoms in seen.values():
        assert PUBLISHED[name].truth <= set(symptoms)
    assert set(measured()[name]) == PUBLISHED[name].truth | PUBLISHED[name].also


def measured_by_seed() -> dict[str, dict[str, list[str]]]:
    held: dict[str, dict[str, list[str]]] = json.loads(MEASURED.read_text())
    return held


def test_there_are_enough_programs_of_each_kind() -> None:
    assert len(FAULTY) >= 30
    assert len(PUBLISHED) == 2 * len(FAULTY)
    assert len(HEALTHY) >= 20
    assert all(program.source for program in HEALTHY.values())
    for part in ("tune", "held_out"):
        held = [PUBLISHED[name].truth for name in FAULTY if part_of(name) == part]
        assert frozenset().union(*held) == set(SYMPTOMS)


def test_parts_name_programs_and_keep_twins_together() -> None:
    assert not TUNE - set(programs())
    assert all(part_of(name) == part_of(name + FIXED) for name in FAULTY)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["dense_regression_nan", "conv_rate_kills_units.fixed"])
def test_the_fixed_clock_makes_a_report_repeatable(name: str, tmp_path: Path) -> None:
    urls = [record(programs()[name], 1, tmp_path / folder, 0.001, 60) for folder in ("one", "two")]
    one, other = (open_run(url).rows() for url in urls)
    assert one.catalogue == other.catalogue
    for column in ("step", "mode", "tensor"):
        assert getattr(one, column).tobytes() == getattr(other, column).tobytes()
    for held, again in (
        (one.statistics, other.statistics),
        (one.statistics.histogram, other.statistics.histogram),
    ):
        for field in fields(held):
            column = getattr(held, field.name)
            if isinstance(column, np.ndarray):
                assert column.tobytes() == getattr(again, field.name).tobytes(), field.name
    assert {name: figures.tobytes() for name, figures in one.probes.items()} == {
        name: figures.tobytes() for name, figures in other.probes.items()
    }
    assert judged(urls[0]) == judged(urls[1])


# Scores


def train_scored(recorder: Recorder, seed: int, clock: Clock) -> None:
    """Nothing: these are only scored."""


SCORED_PROGRAMS = {
    "late": Program(
        "late",
        train_scored,
        "faulty",
        frozenset({"nan_or_inf", "dead_relu"}),
        frozenset({"overfit"}),
        onset=50,
    ),
    "late.fixed": Program("late.fixed", train_scored, "fixed"),
    "odd": Program("odd", train_scored, "healthy"),
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
    tallies = score(REPORT, SCORED_PROGRAMS).symptoms
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
    held = score(REPORT, SCORED_PROGRAMS)
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
    add_own(figures, REPORT, SCORED_PROGRAMS)
    assert figures.figures["held_out/recall"].target is not None
    assert figures.figures["held_out/alarms, mended twins"].value == pytest.approx(0.5)
    assert figures.figures["held_out/alarms, longer healthy trainings"].value == pytest.approx(2.0)
    assert "tune/recall" not in figures.figures


# Witnessed programs


def train_counted(run: Training) -> None:
    """Nothing: these are only counted."""


CALM = Witnessed("calm", train_counted, "difficult", "nothing")
BROKEN = Witnessed(
    "broken", train_counted, "mid_run", "a fault", onset=100, accepted=frozenset({"loss_spike"})
)
GOOD = Quality("accuracy", 0.1, 0.9, expected=True, words="accuracy 0.1 → 0.9 (at least 0.8)")
BAD = Quality("accuracy", 0.1, 0.3, expected=False, words="accuracy 0.1 → 0.3 (at least 0.8)")


def alarm_of(rule: str, step: int, severity: str = "warning", *, stops: bool = False) -> Alarm:
    return Alarm(rule, step, severity, stops, 0, "loss", "as it is")


def result(program: Witnessed, *alarms: Alarm, faulty: bool = False, quality: Quality = GOOD) -> Result:
    return Result(program.name, 0, faulty, alarms, (quality,), 1.0)


def test_the_names_of_programs_are_those_of_their_registration() -> None:
    programs = witnessed_programs()
    assert all(name == program.name for name, program in programs.items())
    assert not set(DIFFICULT) & set(MID_RUN)
    assert all(program.why for program in programs.values())


def test_accepted_rules_exist() -> None:
    for program in witnessed_programs().values():
        assert program.accepted <= set(RULES), program.name
        assert bool(program.accepted) == (program.kind == "mid_run")


def test_halves_are_fixed_and_share_no_seed() -> None:
    assert not set(SEEDS["tune"]) & set(SEEDS["held_out"])
    assert half_of("click_prediction") == half_of("click_prediction")
    assert {half_of(name) for name in "abcdefgh"} == {"tune", "held_out"}


def test_there_are_enough_of_each() -> None:
    programs = witnessed_programs().values()
    difficult = [program for program in programs if program.kind == "difficult"]
    assert len(difficult) >= 60
    assert len(MID_RUN) >= 25
    held_out = [program for program in difficult if program.half == "held_out"]
    assert len(held_out) * len(SEEDS["held_out"]) >= 100
    assert all(programs_of(Chosen(), "mid_run", half) for half in SEEDS)


def test_a_fraction_takes_programs_of_one_half_evenly() -> None:
    whole = programs_of(Chosen(), "mid_run", "tune")
    part = programs_of(Chosen(fraction=0.5), "mid_run", "tune")
    assert len(part) == round(len(whole) / 2)
    assert set(part) <= set(whole)
    assert all(program.half == "tune" for program in whole)


def test_healthy_runs_count_rules_once_and_info_apart() -> None:
    tally = counted(
        [
            result(CALM),
            result(
                CALM, alarm_of("overfit", 10), alarm_of("overfit", 90), alarm_of("class_imbalance", 5, "info")
            ),
            result(CALM, alarm_of("nan_or_inf", 7, "critical", stops=True)),
            result(CALM, alarm_of("frozen_batch_norm", 7, "info")),
        ],
        {"calm": CALM},
    )
    assert (tally.healthy, tally.alarms, tally.flagged, tally.notes, tally.stopped) == (4, 2, 2, 2, 1)
    assert not tally.unexpected


def test_a_fault_is_found_by_an_accepted_rule_at_or_after_its_onset() -> None:
    early = result(BROKEN, alarm_of("loss_spike", 99), faulty=True)
    other = result(BROKEN, alarm_of("overfit", 120), faulty=True)
    found = result(
        BROKEN, alarm_of("overfit", 20), alarm_of("loss_spike", 100), alarm_of("loss_spike", 130), faulty=True
    )
    late = result(BROKEN, alarm_of("loss_spike", 50), alarm_of("loss_spike", 107), faulty=True)
    tally = counted([early, other, found, late, result(BROKEN)], {"broken": BROKEN})
    assert (tally.faulty, tally.healthy, tally.delays, tally.early) == (4, 1, [0, 7], 3)
    assert tally.found == 0.5
    assert delay_of(early, BROKEN) is None


def test_a_program_that_is_not_as_it_claims_is_told() -> None:
    tally = counted([result(CALM, quality=BAD)], {"calm": CALM})
    assert tally.unexpected == ["calm 0: accuracy 0.1 → 0.3 (at least 0.8)"]
    nothing = Result("calm", 0, faulty=False, alarms=(), qualities=(), seconds=1.0)
    assert counted([nothing], {"calm": CALM}).unexpected == ["calm 0: nothing was measured"]


def test_a_program_that_raises_is_told_and_is_no_run() -> None:
    failed = Result("calm", 0, faulty=False, alarms=(), qualities=(), seconds=0.0, failure="ValueError: no")
    tally = counted([failed, result(CALM)], {"calm": CALM})
    assert (tally.healthy, tally.unexpected) == (1, ["calm 0: failed: ValueError: no"])


def test_lines_name_rule_step_severity_and_stop() -> None:
    (head, told) = lines([result(CALM, alarm_of("nan_or_inf", 7, "critical", stops=True))], CALM)
    assert head.startswith("calm, seed 0")
    assert "nan_or_inf at step 7, critical, STOPS" in told


@pytest.mark.parametrize(
    ("faulty", "value", "expected"),
    [(False, 0.9, True), (False, 0.5, False), (True, 0.9, False), (True, 0.5, True), (True, math.nan, True)],
)
def test_a_bound_separates_sound_from_faulty(
    tmp_path: pytest.TempPathFactory, faulty: bool, value: float, expected: bool
) -> None:
    training = Training(0, lambda first: Hook(str(tmp_path), first_step=first), lambda: None, faulty=faulty)
    training.separates("accuracy", 0.8, value, sound_at_least=0.85)
    training.hook.close()
    assert [quality.expected for quality in training.qualities] == [expected]


@pytest.mark.ci
def test_a_program_is_recorded_judged_and_witnessed() -> None:
    (sound, faulty) = run_here(Task("nan_in_a_column", (0,), (False, True), "default"))
    assert not sound.unexpected
    assert not faulty.unexpected
    program = MID_RUN["nan_in_a_column"]
    assert delay_of(faulty, program) is not None
    assert not [alarm for alarm in sound.alarms if alarm.severity == "critical"]


@pytest.mark.release
@pytest.mark.parametrize(("name", "shown"), [("nan_in_a_column", True), ("division_by_zero", False)])
def test_alarms_of_held_out_programs_are_not_printed(
    name: str, shown: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    figures = Figures("Detection")
    ran = run_witnessed(figures, Chosen(only=(name,), seeds=(0,), processes=1))
    printed = capfd.readouterr().out
    assert ("at step" in printed) == shown
    assert bool(ran.tuned) == shown
    (half,) = {title.partition("/")[0] for title in figures.figures}
    assert half == f"mid-run, {half_of(name)}"
    assert figures.figures[f"{half}/found"].value == 1.0


# Programs of other frameworks


def alarm(rule: str, step: int) -> Alarm:
    return Alarm(rule, step, "critical", False, 0, "", "")


def test_each_framework_has_a_program_and_expects_default_rules() -> None:
    assert {program.framework for program in PROGRAMS.values()} == {
        "jax",
        "keras",
        "tensorflow",
        "xgboost",
        "lightgbm",
    }
    rules = {config.rule for config in DEFAULT_RULES}
    for program in PROGRAMS.values():
        assert program.expected <= rules
        assert program.expected


def test_only_the_planted_batch_is_not_finite() -> None:
    bad = [number for number, (x, _) in enumerate(batches(0, zero_example=True)) if np.isnan(x).any()]
    assert bad == [BAD_BATCH]
    assert not any(np.isnan(x).any() for x, _ in batches(0))


def test_a_fault_is_found_by_an_expected_rule_from_its_onset() -> None:
    name = "jax_zero_example"
    early = FrameworkRun(name, 0, True, 2.0, 2.0, (alarm("nan_or_inf", BAD_BATCH - 1),))
    other = FrameworkRun(name, 0, True, 2.0, 2.0, (alarm("loss_spike", BAD_BATCH),))
    late = FrameworkRun(name, 0, True, 2.0, 2.0, (alarm("nan_or_inf", BAD_BATCH + 3),))
    assert (early.is_found, other.is_found, late.is_found) == (False, False, True)
    assert late.delay == 3


@pytest.mark.parametrize(
    ("faulty", "last", "is_as_claimed"),
    [
        (False, 1.0, True),
        (False, 1.9, False),
        (True, 1.9, True),
        (True, float("nan"), True),
        (True, 0.5, False),
    ],
)
def test_a_healthy_program_must_learn_and_a_faulty_one_must_not(
    faulty: bool, last: float, is_as_claimed: bool
) -> None:
    found = FrameworkRun("jax_zero_example", 0, faulty, 2.0, last)
    assert (not found.unexpected) == is_as_claimed


def test_programs_without_their_framework_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "python_of", lambda program: None)
    figures = Figures("Detection")
    assert run_frameworks(figures, (0,), only=["jax_zero_example"], processes=1) == []
    assert not figures.figures
    assert any("jax_zero_example" in remark for remark in figures.remarks)
