"""Stops: the launcher's setting with the program's own handling, and two ranks that stop after the same step; the test acts as the service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.services.jobs import eventually
from watchstep import Bounds, CaptureConfig, Hook, StopTraining, open_run, resume_from
from watchstep.errors import ConfigError
from watchstep.format import documents
from watchstep.format.control import ControlDocument, StopRequest, find_answers
from watchstep.format.documents import AttemptDocument
from watchstep.format.layout import CONTROL_DOCUMENT, attempt_document
from watchstep.stopping import OnStop
from watchstep.store.store import Store


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
    monkeypatch.setenv("WATCHSTEP_RUN", "r")


def requested_hook(tmp_path: Path, on_stop: OnStop | None = None) -> Hook:
    """A hook that gets a stop request after its first step."""
    hook = Hook(tmp_path, on_stop=on_stop)
    hook._control_changed(ControlDocument().with_stop(StopRequest("a1", 0, "NaN")), "a1")
    return hook


@pytest.mark.parametrize(("word", "ends"), [("raise", True), ("stop", True), ("", False), ("ignore", False)])
def test_words_end_a_program_without_a_function_or_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, ends: bool
) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", word)
    expected: AbstractContextManager[Any] = pytest.raises(StopTraining) if ends else nullcontext()
    with requested_hook(tmp_path) as hook, expected:
        hook.step()


def test_a_program_that_ends_while_a_checkpoint_is_waited_for_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", "checkpoint")
    with requested_hook(tmp_path) as hook:
        hook.step()
        hook.step()
    assert [end.state for end in open_run(hook.run_url).ends()] == ["completed"]


def test_several_ranks_stop_together_without_waiting_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", "checkpoint")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with requested_hook(tmp_path) as hook, pytest.raises(StopTraining):
        hook.step()
    assert "no checkpoint is waited for" in hook.health["notes"]["on_stop"]


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize(("on_stop", "state"), [("ignore", "completed"), ("check", "stopped")])
def test_how_a_run_ended_does_not_depend_on_who_reads_of_its_stop(
    tmp_path: Path, on_stop: OnStop, state: str, looks: bool
) -> None:
    with requested_hook(tmp_path, on_stop) as hook:
        for _ in range(3):
            hook.step()
            if looks:
                assert hook.stopped is not None
                assert hook.stopped.reason == "NaN"
    (end,) = open_run(hook.run_url).ends()
    assert (end.state, end.reason) == (state, "NaN" if on_stop == "check" else "")


def test_a_program_that_checks_is_a_rank_that_stops_with_the_others(tmp_path: Path) -> None:
    with Hook(tmp_path, run="r", on_stop="check") as hook:
        pass
    data = Store.open(hook.run_url).get(attempt_document("a1"))
    assert documents.decode(AttemptDocument, data, "attempt").on_stop == "callback"


def test_an_unknown_word_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", "maybe")
    with pytest.raises(ConfigError, match="maybe"):
        Hook(tmp_path)


def test_a_function_saves_and_the_program_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[StopRequest] = []
    with requested_hook(tmp_path, requests.append) as hook:
        hook.step()  # a function by itself ends nothing
    monkeypatch.setenv("WATCHSTEP_ON_STOP", "checkpoint")
    with requested_hook(tmp_path, requests.append) as hook, pytest.raises(StopTraining) as stopped:
        hook.step()
    assert (stopped.value.code, stopped.value.step) == (86, 0)
    assert [request.reason for request in requests] == ["NaN", "NaN"]


def test_what_a_launch_continues_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resume_from() is None
    monkeypatch.setenv("WATCHSTEP_RESUME_FROM", "checkpoints/step-40.pt")
    monkeypatch.setenv("WATCHSTEP_FIRST_STEP", "41")
    assert resume_from() == "checkpoints/step-40.pt"
    with Hook(tmp_path) as hook:
        assert hook._recorder.step == 41
    with Hook(tmp_path, first_step=7) as hook:
        assert hook._recorder.step == 7
    for invalid in ("none", "9" * 5000):
        monkeypatch.setenv("WATCHSTEP_FIRST_STEP", invalid)
        with pytest.raises(ConfigError, match=r"(?i)first_step"):
            Hook(tmp_path)


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
    until(lambda: "left" in {answer.state for answer in find_answers(ranks.store, "a1", 3)})
    assert 0 in ranks.answers(3)
    ranks.close()
    assert stopped == []
    assert "step 3" in ranks.hooks[0].health["notes"]["stop"]
