"""The benchmark's programs of other frameworks: that they are described, left out where they cannot run, and judged by their onset."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.detection.isolated import Alarm
from benchmarks.detection.other_frameworks import run
from benchmarks.detection.other_frameworks.program import BAD_BATCH, PROGRAMS, batches
from benchmarks.detection.other_frameworks.run import FrameworkRun, run_frameworks
from benchmarks.report import Report
from watchstep_rules.config.defaults import DEFAULT_RULES


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
    figures = Report("Detection")
    assert run_frameworks(figures, (0,), only=["jax_zero_example"], processes=1) == []
    assert not figures.figures
    assert any("jax_zero_example" in remark for remark in figures.remarks)
