"""Losses that leave their range, and limited bursts of measurements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep import CaptureConfig
from watchstep.capture.health import RecorderHealth
from watchstep.capture.schedule import Schedule
from watchstep.capture.steps.record import LossOnsets, LossRange


def excesses(losses: list[float]) -> list[int]:
    loss_range = LossRange()
    return [place for place, loss in enumerate(losses) if loss_range.excess(loss) > 0]


def noisy(level: float, share: float, count: int, seed: int = 0) -> list[float]:
    values: list[float] = (level * (1 + share * np.random.default_rng(seed).normal(size=count))).tolist()
    return values


def test_what_leaves_the_range_of_the_losses_before_is_an_onset() -> None:
    sound = noisy(2.0, 0.05, 100)
    assert excesses(sound) == []
    assert excesses([*sound, 5.0]) == [100]
    assert excesses([*sound, 2.4]) == [], "less than a quarter above"
    assert excesses([*sound[:10], 1e6]) == [], "too few losses make no range"
    assert excesses([*sound, float("nan"), float("inf")]) == [], "what the gate sees"


@pytest.mark.parametrize(
    "losses",
    [
        [2.0 * 0.98**step for step in range(300)],
        noisy(1.0, 0.3, 300),
        [-value for value in noisy(5.0, 0.02, 300)],
        [0.0] * 300,
        (2.0 + np.linspace(0, 2, 300)).tolist(),
    ],
    ids=["falls", "noisy", "below zero", "zero", "rises slowly"],
)
def test_sound_losses_have_no_onset(losses: list[float]) -> None:
    assert excesses(losses) == []


def schedule() -> tuple[Schedule, RecorderHealth]:
    health = RecorderHealth()
    return Schedule(CaptureConfig(overhead_budget=None, collections={}), health), health


def test_a_burst_is_of_five_steps_and_four_fit_into_a_thousand() -> None:
    plan, health = schedule()
    begun = [step for step in range(0, 900, 10) if plan.onset(step, 1.0)]
    assert begun == [0, 10, 20, 30]
    assert not plan.onset(33, 1.0), "it goes on"
    assert plan.onset(1001, 1.0)
    assert health.counted()["counts"] == {"measured_onsets": 5, "unmeasured_onsets": 86}


def test_what_is_far_greater_than_the_onsets_before_is_measured_all_the_same() -> None:
    plan, _ = schedule()
    for step in range(0, 50, 10):
        plan.onset(step, 1.0)
    assert plan.onset(100, 4.0)
    assert not plan.onset(110, 15.0)
    assert [plan.onset(200 + 10 * power, 8.0 * 4.0**power) for power in range(1, 6)] == [True] * 3 + [
        False
    ] * 2


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.1, 1e9)), max_size=60))
def test_no_more_than_eight_in_a_thousand_steps(onsets: list[tuple[int, float]]) -> None:
    plan, _ = schedule()
    steps = np.cumsum([gap for gap, _ in onsets]).tolist()
    begun = [step for step, (_, excess) in zip(steps, onsets, strict=True) if plan.onset(step, excess)]
    assert all(
        len([second_loss for second_loss in begun if step <= second_loss < step + 1000]) <= 8
        for step in begun
    )


def test_each_name_has_a_range_and_what_is_derived_one_of_its_own() -> None:
    onsets = LossOnsets(lambda excess: excess > 0)
    for first_loss, second_loss in zip(noisy(1.0, 0.05, 50), noisy(100.0, 0.05, 50, 1), strict=True):
        assert not onsets.add("loss", first_loss, derived=True)
        assert not onsets.add("loss", second_loss, derived=False)
        assert not onsets.add("loss_2", -second_loss, derived=False)
    assert onsets.add("loss", 100.0, derived=True)
