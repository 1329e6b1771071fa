"""A training thread that does not move is reported, with the line at which it waits; one that moves, or that waits for a person, is not."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.sdk.training import small_model, train_step
from watchstep import Bounds, CaptureConfig, Hook, open_run
from watchstep.capture.health import RecorderHealth
from watchstep.capture.steps.stalls import Stall, StallWatch, StepProgress
from watchstep_rules import RuleConfig, backtest_run


class Watched:
    """A training whose steps and clock are a test's, watched for stalls of two minutes."""

    def __init__(self, seconds: float = 120.0) -> None:
        self.now = 0.0
        self.progress = StepProgress(0, -1, 0)
        self.health = RecorderHealth()
        self.watch = StallWatch(lambda: self.progress, self.health, seconds, lambda: self.now)

    def train(self, thread: int, steps: int = 20, each: float = 2.0) -> None:
        """End steps, one in ``each`` seconds."""
        for _ in range(steps):
            self.now += each
            self.progress = StepProgress(self.progress.step + 1, self.progress.step, thread)
            assert self.watch.look() is None

    def wait(
        self, seconds: float, each: float = 10.0, between: Callable[[], None] | None = None
    ) -> list[Stall]:
        """Let time pass, with a look in each ten seconds. Returns what is to be recorded."""
        found = []
        for _ in range(round(seconds / each)):
            self.now += each
            if between is not None:
                between()
            if (stall := self.watch.look()) is not None:
                found.append(stall)
        return found


@contextmanager
def running(function: Callable[[], None]) -> Iterator[int]:
    """Run a function in a thread until it waits. Yields the id of the thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    assert thread.ident is not None
    yield thread.ident
    thread.join()


@contextmanager
def waiting() -> Iterator[int]:
    """A thread that waits for a lock."""
    lock, begun = threading.Lock(), threading.Event()
    lock.acquire()

    def work() -> None:
        begun.set()
        lock.acquire()

    with running(work) as thread:
        begun.wait()
        try:
            yield thread
        finally:
            lock.release()


def test_a_thread_that_waits_is_reported_with_its_line() -> None:
    watched = Watched()
    with waiting() as thread:
        watched.train(thread)
        first, *later = watched.wait(400)
    assert first.step == 20
    assert 120 <= first.seconds <= 140
    assert first.place.startswith("test_stalls.py:")
    assert first.place.endswith(" in work")
    assert [stall.seconds - first.seconds for stall in later] == [60, 120, 180, 240]
    note = watched.health.counted()["notes"]["stall"]
    assert (
        f" s, since step 19 (usual: 2 s), and the training thread does not move: it is at {first.place}; stack, innermost first: "
        in note
    )


def test_a_step_that_ends_withdraws_the_note() -> None:
    watched = Watched()
    with waiting() as thread:
        watched.train(thread)
        assert len(watched.wait(140)) == 1
        watched.train(thread)
    assert "stall" not in watched.health.counted()["notes"]


def test_steps_that_are_usually_long_are_waited_for() -> None:
    watched = Watched()
    with waiting() as thread:
        watched.train(thread, each=20)
        assert watched.wait(590) == []
        assert len(watched.wait(40)) == 1


def test_a_call_that_ends_many_steps_together_is_waited_for_again() -> None:
    watched = Watched()
    with waiting() as thread:
        watched.progress = StepProgress(0, -1, thread)
        for _ in range(5):  # a scan over a hundred steps, which takes five minutes
            assert watched.wait(300) == []
            watched.progress = StepProgress(watched.progress.step + 100, watched.progress.step + 99, thread)
        assert watched.wait(450) == []
        assert len(watched.wait(60)) == 1


def test_a_thread_that_moves_is_not_reported() -> None:
    watched = Watched()
    gates, ends = [threading.Semaphore(0), threading.Semaphore(0)], threading.Event()
    places = threading.Semaphore(0)

    def work() -> None:
        while not ends.is_set():
            places.release()
            gates[0].acquire()
            places.release()
            gates[1].acquire()

    turn = 0

    def move() -> None:
        nonlocal turn
        gates[turn % 2].release()
        turn += 1
        places.acquire()

    with running(work) as thread:
        places.acquire()
        watched.train(thread)
        assert watched.wait(1000, between=move) == []
        ends.set()
        for gate in gates:
            gate.release()


def test_a_thread_that_sleeps_or_waits_for_a_person_is_not_reported() -> None:
    lock, begun = threading.Lock(), threading.Event()
    lock.acquire()
    sleep = lock.acquire

    def work() -> None:
        begun.set()
        sleep()

    watched = Watched()
    with running(work) as thread:
        begun.wait()
        watched.train(thread)
        assert watched.wait(1000) == []
        lock.release()


def test_a_thread_that_serves_once_its_training_has_ended_is_not_reported() -> None:
    loop, begun = asyncio.new_event_loop(), threading.Event()

    def work() -> None:
        loop.call_soon(begun.set)
        loop.run_forever()

    watched = Watched()
    with running(work) as thread:
        begun.wait()
        watched.train(thread)
        assert watched.wait(1000) == []
        loop.call_soon_threadsafe(loop.stop)
    loop.close()


def test_time_in_which_the_process_does_not_run_does_not_count() -> None:
    watched = Watched()
    with waiting() as thread:
        watched.train(thread)
        assert watched.wait(50) == []
        assert watched.wait(3600, each=3600) == []
        assert watched.wait(50) == []
        assert len(watched.wait(60)) == 1


def test_a_training_that_has_hardly_begun_is_not_judged() -> None:
    watched = Watched()
    with waiting() as thread:
        watched.train(thread, steps=2)
        assert watched.wait(2000) == []


@pytest.mark.ci
def test_a_recording_has_the_line_and_the_rule_fires(tmp_path: Path) -> None:
    config = replace(CaptureConfig(), bounds=Bounds(stall_seconds=1.0))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4, 8), torch.tensor([0, 1, 0, 1])
    lock = threading.Lock()
    lock.acquire()
    with Hook(tmp_path, run="r", config=config) as hook:
        hook.watch(model, optimizer)

        def release() -> None:
            while "stall" not in hook.health["notes"]:
                threading.Event().wait(0.05)
            lock.release()

        for _ in range(6):
            train_step(model, optimizer, x, y)
        releasing = threading.Thread(target=release)
        releasing.start()
        lock.acquire()  # the training hangs
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        for _ in range(4):
            train_step(model, optimizer, x, y)
        releasing.join()
    assert not hook.health["faults"]
    run = open_run(hook.run_url)
    (name,) = [each for each in run.tensors() if each.startswith("training:stalled@")]
    assert run.tensor(name).steps() == [4]
    assert run.tensor("loss").steps() == list(range(10))
    (attempt,) = backtest_run(
        hook.run_url, [RuleConfig(rule="training_hangs", params={"seconds": 1.0})]
    ).attempts
    (fired,) = attempt.outcomes[0].fired
    assert fired.step == 4
    assert fired.finding is not None
    assert (
        f"no training thread moves: rank 0 at test_stalls.py:{line} in test_a_recording"
        in fired.finding.message
    )
