"""The overhead budget, with a fake clock: it respects its share, saves up for expensive tensors, and starves none."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.capture.config import ADAPTIVE, Cadence, CaptureConfig, Collection
from watchstep.capture.health import RecorderHealth
from watchstep.capture.schedule import DENSE_STEPS, FLOOR_FACTOR, LATE_GAP, LONGEST_GAP, Budget, Schedule
from watchstep.format.tensors import Mode


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Simulation:
    """Steps under a budget; what is due costs what it costs.

    Args:
        dense: has the first steps behind it, which are measured more often.
        seconds: of a step; below 5 ms no step is measured for a longest gap.
    """

    def __init__(
        self, costs: Mapping[str, float], share: float = 0.01, *, dense: bool = True, seconds: float = 0.004
    ) -> None:
        self.costs, self.clock, self.step, self.seconds = dict(costs), Clock(), 0, seconds
        self.budget = Budget(list(costs), share, clock=self.clock)
        if dense:
            self.run(DENSE_STEPS)

    def run(self, steps: int) -> dict[str, int]:
        """Returns how often each was measured."""
        measured = dict.fromkeys(self.costs, 0)
        for step in range(self.step, self.step + steps):
            for name, cost in self.costs.items():
                if name in self.budget.planned(step):
                    self.clock.now += cost
                    self.budget.spent(name, cost)
                    measured[name] += 1
            self.clock.now += self.seconds
        self.step += steps
        return measured


def test_the_cost_is_stated_since_the_start_and_in_the_last_minutes() -> None:
    simulation = Simulation({"a": 1e-5}, dense=False, seconds=0.01)
    simulation.budget.report_extra(60.0)
    simulation.run(60_000)
    shares = simulation.budget.shares()
    assert shares["steps"] == 59_999  # the last one is not closed
    assert shares["share"] > 0.09
    assert shares["recent_share"] < 0.011


costs = st.dictionaries(st.sampled_from("abcd"), st.floats(1e-6, 0.2), min_size=1)


@given(costs=costs, share=st.sampled_from([0.001, 0.01, 0.1]))
def test_after_the_first_steps_it_keeps_to_its_share(costs: dict[str, float], share: float) -> None:
    simulation = Simulation(costs, share)
    measured = simulation.run(3000)
    spent = sum(costs[name] * times for name, times in measured.items())
    assert spent <= share * 3000 * simulation.seconds + 2 * max(costs.values())


@given(costs=costs, share=st.sampled_from([0.001, 0.01]))
def test_each_collection_is_measured_every_ten_steps_unless_that_costs_three_times_the_budget(
    costs: dict[str, float], share: float
) -> None:
    simulation = Simulation(costs, share, seconds=0.1)
    gaps, spent = dict.fromkeys(costs, 0), 0.0
    longest = dict(gaps)
    for _ in range(800):
        for name, times in simulation.run(1).items():
            gaps[name] = 0 if times else gaps[name] + 1
            longest[name] = max(longest[name], gaps[name])
            spent += times * costs[name]
    if sum(costs.values()) <= LONGEST_GAP * FLOOR_FACTOR * share * simulation.seconds:
        assert max(longest.values()) < LONGEST_GAP
    assert spent <= FLOOR_FACTOR * share * 800 * simulation.seconds * 1.01 + 2 * sum(costs.values())


def test_later_collections_are_measured_every_fifty_steps_or_ten_seconds() -> None:
    for seconds, gap in ((1.0, LATE_GAP), (0.02, 500)):
        # The budget pays for a record every 2 * gap steps, and three times the budget for one at each gap.
        simulation = Simulation({"a": 0.002 * gap * seconds}, 0.001, seconds=seconds)
        simulation.run(1000)
        assert simulation.run(3000)["a"] == pytest.approx(3000 / gap, abs=2), seconds


@given(costs=costs, share=st.sampled_from([0.001, 0.01]))
def test_the_first_three_steps_measure_everything_whatever_that_costs(
    costs: dict[str, float], share: float
) -> None:
    simulation = Simulation(costs, share, dense=False)
    assert simulation.run(3) == dict.fromkeys(costs, 3)
    assert simulation.budget.as_data()["spent_seconds"] >= 3 * sum(costs.values()) * (1 - 1e-9)


def test_a_first_step_without_time_of_the_programs_own_does_not_hide_the_next_ones() -> None:
    simulation = Simulation({"a": 1e-4}, dense=False, seconds=0.02)
    simulation.budget.planned(0)
    simulation.budget.report_extra(1.0)  # more than the step took
    simulation.step = 1
    assert simulation.run(300)["a"] >= 30


def test_cheap_measurements_are_made_most_often_and_expensive_ones_in_turn() -> None:
    measured = Simulation({"cheap": 1e-5, "dear": 8e-4}).run(2000)
    assert measured["dear"] > 50
    assert measured["cheap"] >= measured["dear"]


def test_missing_objects_delay_nothing() -> None:
    simulation = Simulation({"gone": 2e-3, "left": 1.6e-3})
    del simulation.costs["gone"]
    assert simulation.run(4000)["left"] > 40


def test_the_first_hundred_steps_are_dense() -> None:
    simulation = Simulation({"a": 4e-4}, dense=False)
    early, late = (simulation.run(DENSE_STEPS)["a"] for _ in range(2))
    assert early > 3 * late


def test_writing_is_paid_for_too() -> None:
    simulation = Simulation({"a": 4e-5})
    assert simulation.run(500)["a"] > 400
    for _ in range(500):
        simulation.budget.written(3.6e-5)
        simulation.run(1)
    assert simulation.budget.as_data()["share"] < 0.03


def test_a_writer_that_costs_more_than_the_budget_does_not_end_measuring() -> None:
    simulation, measured = Simulation({"a": 4e-5}), 0
    for _ in range(1000):
        simulation.budget.written(4e-4)
        measured += simulation.run(1)["a"]
    assert 150 < measured < 250  # a fifth of the allowance


def test_a_floor_over_the_budget_is_reported() -> None:
    clock = Clock()
    health = RecorderHealth()
    schedule = Schedule(CaptureConfig(collections={"a": ADAPTIVE}, clock=clock), health)
    for step in range(DENSE_STEPS + 20):
        schedule.due(("a",), step)
        clock.now += 0.001
        schedule.dispatched(0.0005)
        schedule.check_floor()
        clock.now += 0.0005
    assert "alone exceed the budget" in health.as_data()["notes"]["budget"]


def test_a_demand_is_for_three_bad_steps_in_a_row() -> None:
    config = CaptureConfig(collections={"a": Cadence(start=10**6)}, clock=Clock())
    schedule = Schedule(config, RecorderHealth())
    seen = []
    for step in range(10):
        if step >= 2:
            schedule.demand(step)
        seen.append(schedule.due(("a",), step))
    assert [step for step, due in enumerate(seen) if due] == [2, 3, 4]
    assert schedule.due(("unknown",), 2) is None


def test_many_short_series_of_bad_steps_keep_to_the_budget() -> None:
    clock = Clock()
    health = RecorderHealth()
    schedule = Schedule(CaptureConfig(collections={"a": ADAPTIVE}, allowance_seconds=0, clock=clock), health)
    bad_measured, cost = 0, 0.0
    for step in range(3000):
        if step % 3 == 0:
            bad_measured += schedule.demand(step)
        if schedule.due(("a",), step):
            since = clock.now
            clock.now += 0.0008
            schedule.spent("a", since)
            cost += 0.0008 if step >= 1000 else 0.0
        clock.now += 0.004
    assert cost <= 0.01 * 2000 * 0.004 + 0.0008
    assert 8 <= bad_measured < 400
    assert health.as_data()["counts"]["unmeasured_bad_steps"] == 1000 - bad_measured


def test_without_a_budget_every_series_of_bad_steps_is_measured() -> None:
    schedule = Schedule(CaptureConfig(overhead_budget=None, collections={}), RecorderHealth())
    assert all(schedule.demand(step) for step in range(0, 300, 3))


def test_other_modes_count_their_own_passes() -> None:
    by_mode: dict[Mode, Cadence | None] = {"eval": Cadence(every=2, start=1), "predict": None}
    config = CaptureConfig(collections={"a": Collection(Cadence(every=5), modes=by_mode)})
    schedule = Schedule(config, RecorderHealth())
    seen = []
    for _ in range(6):
        schedule.forward("eval", 3)
        seen.append(schedule.due(("a",), 3, "eval") is not None)
    assert seen == [False, True] * 3
    schedule.forward("predict", 3)
    assert schedule.due(("a",), 5, "predict") is None
    assert schedule.due(("a",), 5) == "a"


def test_of_the_passes_between_two_steps_the_first_is_adaptive() -> None:
    schedule = Schedule(CaptureConfig(collections={"a": ADAPTIVE}, clock=Clock()), RecorderHealth())
    seen = []
    for step in (4, 4, 4, 9, 9):
        schedule.forward("eval", step)
        seen.append(schedule.due(("a",), step, "eval") is not None)
    assert seen == [True, False, False, True, False]


def test_the_service_can_set_a_cadence() -> None:
    schedule = Schedule(CaptureConfig(collections={"a": Cadence(every=100)}), RecorderHealth())
    schedule.override({"a": 2, "unknown": 3})
    assert [step for step in range(6) if schedule.due(("a",), step)] == [0, 2, 4]


def test_steps_by_hand_like_save_config() -> None:
    cadence = Cadence(every=10, start=5, stop=40, steps=(1, 99))
    assert [step for step in range(120) if cadence.due(step)] == [1, 5, 15, 25, 35, 99]


def test_measurements_within_an_endless_step_respect_the_share() -> None:
    clock = Clock()
    schedule = Schedule(CaptureConfig(collections={"a": ADAPTIVE}, clock=clock), RecorderHealth())
    spent = 0.0
    for _ in range(10_000):
        if schedule.due(("a",), 0):
            since = clock.now
            clock.now += 0.01
            spent += 0.01
            schedule.spent("a", since)
        clock.now += 0.01
    assert 0.5 <= spent <= 0.01 * clock.now + 0.02


def test_a_call_that_is_in_progress_counts_in_the_step_in_which_its_time_passed() -> None:
    """A recording may begin within the recorder's first call of a training: its start belongs to no step."""
    clock, work = Clock(), Work()
    budget = Budget(["a"], 0.01, clock=clock)
    work.seconds = 0.5  # imports
    budget.measure_floor(work)
    work.seconds += 0.001
    for step in range(4):
        budget.planned(step)
        work.seconds += 0.002
        clock.now += 0.1
    budget.planned(4)
    assert budget.as_data()["floor_share"] * budget.as_data()["program_seconds"] == pytest.approx(0.009)


class Work:
    """A call of the recorder that does not end."""

    depth = 1
    seconds = 0.0

    def so_far(self) -> float:
        return self.seconds
