"""Records of a step: conditions that are evaluated once the device has finished, and losses that leave their range."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import gradient
from watchstep import CaptureConfig
from watchstep.capture.health import RecorderHealth
from watchstep.capture.schedule import Schedule
from watchstep.capture.steps.record import BoundedQueue, Group, LossOnsets, LossRange, join
from watchstep.capture.steps.recorder import Recorder
from watchstep.format.statistics import scalars
from watchstep.kernels.measurement import Completed


@dataclass(frozen=True)
class KnownCondition:
    """A condition that is answered already."""

    answer: bool

    def is_met(self) -> bool:
        return self.answer


def rows(recorder: Recorder, queue: BoundedQueue) -> dict[str, float]:
    recorder.finish()
    recorder.begin()
    item = queue.take()
    assert item is not None
    block = join(list(item.records))
    return {block.info(row).name: block.statistics.mean[row] for row in range(len(block))}


def recorder() -> tuple[Recorder, BoundedQueue]:
    queue = BoundedQueue(1 << 20)
    return Recorder(0, queue, RecorderHealth(), "ignore"), queue


def test_what_does_not_hold_is_omitted() -> None:
    target, queue = recorder()
    for name, answer in (("a", True), ("b", False)):
        target.add(Group.of((gradient(name),)), Completed(scalars([1.0])), condition=KnownCondition(answer))
    assert rows(target, queue) == {"a.weight:gradient": 1.0}


def test_a_step_may_hold_nothing() -> None:
    target, queue = recorder()
    target.add(Group.of((gradient("a"),)), Completed(scalars([1.0])), condition=KnownCondition(False))
    assert rows(target, queue) == {}


def test_of_awaited_and_logged_numbers_the_programs_own_wins() -> None:
    target, queue = recorder()
    target.awaited_scalar("norm", Completed(scalars([1.0])), derived=True)
    target.scalar("norm", 2.0)
    target.awaited_scalar("norm", Completed(scalars([3.0])), derived=True)
    target.awaited_scalar("other", Completed(scalars([4.0])), condition=KnownCondition(True))
    target.awaited_scalar("never", Completed(scalars([5.0])), condition=KnownCondition(False))
    assert rows(target, queue) == {"norm": 2.0, "other": 4.0}


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
