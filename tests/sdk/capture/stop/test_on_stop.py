"""The launcher's setting for stops, combined with the program's own handling."""

from __future__ import annotations

from pathlib import Path

import pytest

from watchstep import Hook, StopTraining, resume_from
from watchstep.errors import ConfigError
from watchstep.format import documents
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.documents import AttemptDocument, EndDocument
from watchstep.format.layout import attempt_document, end_document
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


@pytest.mark.parametrize("word", ["raise", "stop"])
def test_words_that_end_a_program_without_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", word)
    with requested_hook(tmp_path) as hook, pytest.raises(StopTraining):
        hook.step()


def test_a_program_that_ends_while_a_checkpoint_is_waited_for_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", "checkpoint")
    with requested_hook(tmp_path) as hook:
        hook.step()
        hook.step()
    end = documents.decode(EndDocument, Store.open(hook.run_url).get(end_document("a1", 0)), "end")
    assert end.state == "completed"


def test_several_ranks_stop_together_without_waiting_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", "checkpoint")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with requested_hook(tmp_path) as hook, pytest.raises(StopTraining):
        hook.step()
    assert "no checkpoint is waited for" in hook.health["notes"]["on_stop"]


@pytest.mark.parametrize("word", ["", "ignore"])
def test_words_that_do_not_end_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", word)
    with requested_hook(tmp_path) as hook:
        hook.step()


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
    data = Store.open(hook.run_url).get(end_document("a1", 0))
    end = documents.decode(EndDocument, data, "end")
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


def test_a_failed_save_function_does_not_prevent_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", "checkpoint")

    def save(request: StopRequest) -> None:
        raise OSError(28, "No space left on device")

    hook = requested_hook(tmp_path, save)
    with pytest.raises(StopTraining):
        hook.step()
    hook.close()
    assert "No space left" in hook.health["faults"]["on_stop"]


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
