"""Two hooks, ranks of one attempt, that stop after the same step; the test acts as the service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.services.jobs import eventually
from watchstep import Bounds, CaptureConfig, Hook, StopTraining
from watchstep.format.control import ControlDocument, StopRequest, find_answers
from watchstep.format.layout import CONTROL_DOCUMENT
from watchstep.store.store import Store

QUICK = CaptureConfig(
    overhead_budget=None, system=None, bounds=Bounds(flush_seconds=0.02, control_seconds=0.02)
)
SECONDS = 60.0


class Ranks:
    """Two hooks, and the store between them and the service."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        self.hooks = []
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            self.hooks.append(Hook(folder, run="r", on_stop="raise", config=QUICK))
        self.store = Store.open(self.hooks[0].store_url, create=True).child("default/r")
        self.document = ControlDocument()

    def train(self, rank: int, steps: int) -> None:
        for _ in range(steps):
            self.hooks[rank].log(loss=1.0)
            self.hooks[rank].step()

    def ask(self, step: int, *, agreed: bool = False) -> None:
        stop = StopRequest("a1", step, "it is over", agreed=agreed)
        self.document = self.document.with_stop(stop)
        self.store.put(CONTROL_DOCUMENT, self.document.encode())

    def answers(self, step: int) -> dict[int, str]:
        return {answer.worker: answer.state for answer in find_answers(self.store, "a1", step)}

    def on_a_thread(self, rank: int, steps: int) -> tuple[threading.Thread, list[int]]:
        stopped: list[int] = []

        def run() -> None:
            try:
                self.train(rank, steps)
            except StopTraining as stop:
                stopped.append(stop.step)

        thread = threading.Thread(target=run)
        thread.start()
        return thread, stopped

    def close(self) -> None:
        for hook in self.hooks:
            hook.close()


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path, monkeypatch)


def until(found: Callable[[], bool]) -> None:
    eventually(found, SECONDS)


def test_a_rank_past_the_step_makes_the_other_wait_for_a_later_step(ranks: Ranks) -> None:
    ranks.train(0, 6)
    ranks.train(1, 2)
    ranks.ask(3)
    until(lambda: ranks.answers(3) == {0: "passed", 1: "ready"})
    slow, stopped_slow = ranks.on_a_thread(1, 20)  # comes to step 3, and waits there
    until(lambda: ranks.hooks[1]._recorder.last_finished == 3)
    ranks.train(0, 1)  # one that has passed it goes on
    ranks.ask(9)
    until(lambda: ranks.answers(9) == {0: "ready", 1: "ready"})
    fast, stopped_fast = ranks.on_a_thread(0, 20)
    until(lambda: ranks.hooks[0]._recorder.last_finished == ranks.hooks[1]._recorder.last_finished == 9)
    assert (stopped_slow, stopped_fast) == ([], [])
    ranks.ask(9, agreed=True)
    for thread in (slow, fast):
        thread.join(SECONDS)
    ranks.close()
    assert (stopped_slow, stopped_fast) == ([9], [9])
    assert not any(hook.health["faults"] for hook in ranks.hooks)


def test_a_rank_that_receives_an_end_request_waits_for_no_other(ranks: Ranks) -> None:
    ranks.ask(3)
    until(lambda: ranks.answers(3) == {0: "ready", 1: "ready"})
    waiting, stopped = ranks.on_a_thread(0, 10)
    until(lambda: ranks.hooks[0]._recorder.last_finished == 3)
    ranks.hooks[0]._ending.wake()  # as SIGTERM does where the program handles it
    waiting.join(SECONDS)
    assert ranks.hooks[0]._recorder.last_finished == 9
    until(
        lambda: (
            0 in ranks.answers(3)
            and "left" in {answer.state for answer in find_answers(ranks.store, "a1", 3)}
        )
    )
    ranks.close()
    assert stopped == []
    assert "step 3" in ranks.hooks[0].health["notes"]["stop"]
