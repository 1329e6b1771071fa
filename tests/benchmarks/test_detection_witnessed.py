"""Difficult healthy programs and faults in the middle of runs: that they are what they claim, and how they are counted."""

import math

import pytest

from benchmarks.detection.isolated import Alarm, Result, Task, run_here
from benchmarks.detection.run_witnessed import Chosen, programs_of, run_witnessed
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
from watchstep import Hook
from watchstep_rules.registry import RULES


def train(run: Training) -> None:
    """Nothing: these are only counted."""


CALM = Witnessed("calm", train, "difficult", "nothing")
BROKEN = Witnessed("broken", train, "mid_run", "a fault", onset=100, accepted=frozenset({"loss_spike"}))
GOOD = Quality("accuracy", 0.1, 0.9, expected=True, words="accuracy 0.1 → 0.9 (at least 0.8)")
BAD = Quality("accuracy", 0.1, 0.3, expected=False, words="accuracy 0.1 → 0.3 (at least 0.8)")


def alarm(rule: str, step: int, severity: str = "warning", *, stops: bool = False) -> Alarm:
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
            result(CALM, alarm("overfit", 10), alarm("overfit", 90), alarm("class_imbalance", 5, "info")),
            result(CALM, alarm("nan_or_inf", 7, "critical", stops=True)),
            result(CALM, alarm("frozen_batch_norm", 7, "info")),
        ],
        {"calm": CALM},
    )
    assert (tally.healthy, tally.alarms, tally.flagged, tally.notes, tally.stopped) == (4, 2, 2, 2, 1)
    assert not tally.unexpected


def test_a_fault_is_found_by_an_accepted_rule_at_or_after_its_onset() -> None:
    early = result(BROKEN, alarm("loss_spike", 99), faulty=True)
    other = result(BROKEN, alarm("overfit", 120), faulty=True)
    found = result(
        BROKEN, alarm("overfit", 20), alarm("loss_spike", 100), alarm("loss_spike", 130), faulty=True
    )
    late = result(BROKEN, alarm("loss_spike", 50), alarm("loss_spike", 107), faulty=True)
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
    (head, told) = lines([result(CALM, alarm("nan_or_inf", 7, "critical", stops=True))], CALM)
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
