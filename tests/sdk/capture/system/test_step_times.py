from __future__ import annotations

from watchstep.capture.system.sampler import StepTimes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_is_from_update_to_update_and_waits_until_its_forward_pass() -> None:
    clock = Clock()
    times = StepTimes(clock)
    for wait, work in ((1.0, 3.0), (1.0, 3.0), (0.0, 2.0)):
        clock.now += wait
        times.forward()
        clock.now += work / 2
        times.forward()  # micro-batches: the first one counts
        clock.now += work / 2
        times.finished()
    assert times.first == 104.0
    assert times.take() == ([4.0, 2.0], [0.25, 0.0])
    assert times.take() == ([], [])


def test_a_step_with_an_evaluation_in_it_is_omitted() -> None:
    clock = Clock()
    times = StepTimes(clock)
    for evaluates in (False, True, False):
        clock.now += 1.0
        if evaluates:
            times.other_mode()
        times.forward()
        clock.now += 1.0
        times.finished()
    assert times.take() == ([2.0], [0.5])


def test_an_update_without_a_forward_pass_waits_for_nothing_that_is_seen() -> None:
    clock = Clock()
    times = StepTimes(clock)
    for _ in range(3):
        clock.now += 2.0
        times.finished()
    assert times.take() == ([2.0, 2.0], [])


def test_unconsumed_step_times_are_limited() -> None:
    clock = Clock()
    times = StepTimes(clock)
    for _ in range(70_000):
        clock.now += 1.0
        times.forward()
        times.finished()
    seconds, waits = times.take()
    assert len(seconds) == len(waits) == 65_536
