"""The hook: its arguments, its modes, stopping, and the exceptions that it never raises."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.sdk.training import EVERY_STEP, Training, watched_training
from watchstep import Bounds, CaptureConfig, Hook, StopTraining, open_run
from watchstep.errors import BadNameError, ConfigError, RuleError
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.layout import CONTROL_DOCUMENT
from watchstep.store.store import Store


@pytest.fixture(autouse=True)
def _attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")


QUICK = CaptureConfig(bounds=Bounds(flush_seconds=0.01, control_seconds=0.01))


@pytest.mark.ci
@pytest.mark.parametrize(
    "arguments",
    [
        {"store_url": "ftp://host/x"},
        {"run": "../other"},
        {"project": "a/b"},
        {"on_stop": "explode"},
        {"rules": "missing.yaml"},
    ],
    ids=str,
)
def test_wrong_arguments_are_reported_before_training(tmp_path: Path, arguments: dict[str, str]) -> None:
    with pytest.raises((ConfigError, BadNameError, RuleError)) as caught:
        Hook(**{"store_url": str(tmp_path), **arguments})  # type: ignore[arg-type]
    assert "hint:" in str(caught.value)


def test_the_environment_settles_what_arguments_leave_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_STORE", str(tmp_path))
    monkeypatch.setenv("WATCHSTEP_PROJECT", "vision")
    monkeypatch.setenv("WATCHSTEP_RUN", "night")
    hook = Hook()
    hook.close()
    assert hook.run_url == f"file://{tmp_path}/vision/night"


def test_numbers_of_all_kinds(tmp_path: Path) -> None:
    hook = Hook(tmp_path)
    hook.log({"lr/group 0": 0.1}, loss=torch.tensor(2.0, requires_grad=True), accuracy=1, val_loss=math.nan)
    hook.step()
    hook.close()
    run = open_run(hook.run_url)
    assert run.collections == {"losses": ["loss", "val_loss"], "metrics": ["accuracy", "lr/group 0"]}
    assert run.tensor("val_loss").statistics()["nan"].to_pylist() == [1]


@pytest.mark.parametrize(("value", "reason"), [("abc", "ValueError"), (torch.ones(3), "log one number")])
def test_a_value_that_is_no_number_is_a_fault_not_an_exception(
    tmp_path: Path, value: Any, reason: str
) -> None:
    with Hook(tmp_path) as hook:
        hook.log(loss=value)
    assert reason in hook.health["faults"]["log 'loss'"]


def test_a_bad_value_mode_or_name_takes_no_other_with_it(tmp_path: Path) -> None:
    hook = Hook(tmp_path)
    hook.log({"epoch": "one", 7: 1.0, "\ud800": 1.0}, myloss=2.0)  # type: ignore[dict-item]
    hook.log(accuracy=0.5, mode="valid")  # type: ignore[arg-type]
    hook.step()
    hook.close()
    assert open_run(hook.run_url).losses()["value"].to_pylist() == [2.0]
    assert hook.health["counts"]["faults"] == 4
    assert "mode 'valid'" in hook.health["faults"]["log"]


def test_modes(tmp_path: Path) -> None:
    hook = Hook(tmp_path)
    hook.mode = "eval"
    hook.log(loss=1.0)
    with pytest.raises(ConfigError, match="test"):
        hook.mode = "test"  # type: ignore[assignment]
    hook.close()
    assert open_run(hook.run_url).losses()["mode"].to_pylist() == ["eval"]


def ask_to_stop(hook: Hook, step: int, attempt: str, reason: str = "a rule fired") -> None:
    document = ControlDocument().with_stop(StopRequest(attempt, step, reason))
    store = Store.open(hook.store_url, create=True).child(f"default/{hook.run}")
    store.put(CONTROL_DOCUMENT, document.encode())


def stopping(tmp_path: Path, step: int, **options: Any) -> tuple[Hook, Training]:
    """A training for which a stop after a step was requested."""
    options = {"on_stop": "raise", "reason": "a rule fired", **options}
    reason = options.pop("reason")
    hook, training = watched_training(tmp_path, run="r", config=QUICK, **options)
    ask_to_stop(hook, step, "a1", reason)
    return hook, training


def train_until_stopped(hook: Hook, training: Training) -> StopTraining:
    with pytest.raises(StopTraining) as stopped:
        training.run(100_000)
    hook.close()
    return stopped.value


@pytest.mark.ci
def test_stop_at_a_step(tmp_path: Path) -> None:
    hook, training = stopping(tmp_path, 30)
    stop = train_until_stopped(hook, training)
    assert stop.code == 86
    assert stop.step >= 30
    (end,) = open_run(hook.run_url).ends()
    assert (end.state, end.reason, end.last_step) == ("stopped", "a rule fired", stop.step)
    assert stop.step in open_run(hook.run_url).steps()


@pytest.mark.ci
def test_the_reason_of_a_stop_does_not_act_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook, training = stopping(tmp_path, 5, reason="\x1b[2J\x9b31m\u202e\nforged")
    stop = train_until_stopped(hook, training)
    assert stop.request.reason == "\x1b[2J\x9b31m\u202e\nforged"
    (line,) = capsys.readouterr().err.splitlines()
    assert "stop requested" in line
    assert line.isprintable()


@pytest.mark.ci
@pytest.mark.parametrize("code", [86, 1, 0])
def test_a_program_that_exits_because_of_a_stop_request_was_stopped(tmp_path: Path, code: int) -> None:
    hook, training = stopping(tmp_path, 5)

    def train() -> None:
        with hook:
            try:
                training.run(100_000)
            except StopTraining:
                sys.exit(code)

    with pytest.raises(SystemExit):
        train()
    (end,) = open_run(hook.run_url).ends()
    assert (end.state, end.reason) == ("stopped", "a rule fired")


@pytest.mark.parametrize(("code", "state", "reason"), [(0, "completed", ""), (1, "failed", "SystemExit: 1")])
def test_a_program_that_exits_by_itself(tmp_path: Path, code: int, state: str, reason: str) -> None:
    hook = Hook(tmp_path)
    with pytest.raises(SystemExit), hook:
        sys.exit(code)
    (end,) = open_run(hook.run_url).ends()
    assert (end.state, end.reason) == (state, reason)


def stop_by_checkpoint(tmp_path: Path, seconds: float, *, save_at: int) -> tuple[Hook, StopTraining]:
    """Train until stopped; a checkpoint is saved before the stop, and one so many steps after it."""
    bounds = replace(QUICK.bounds, checkpoint_seconds=seconds)
    hook, training = watched_training(tmp_path, run="r", config=CaptureConfig(bounds=bounds))
    hook.checkpoint_saved("before.pt")
    ask_to_stop(hook, 5, "a1")

    def train() -> None:
        steps_since = 0
        while True:
            if steps_since == save_at:
                hook.checkpoint_saved("after.pt")
            training.run(1)
            steps_since += hook.stopped is not None

    with pytest.raises(StopTraining) as stopped:
        train()
    hook.close()
    return hook, stopped.value


def test_a_stop_waits_for_a_checkpoint_that_is_saved_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", "checkpoint")
    hook, stop = stop_by_checkpoint(tmp_path, 600.0, save_at=7)
    assert stop.code == 86
    (end,) = open_run(hook.run_url).ends()
    assert (end.state, end.reason, end.last_step) == ("stopped", "a rule fired", stop.step)
    assert "on_stop" not in end.health["notes"]


def test_a_stop_that_no_checkpoint_followed_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", "checkpoint")
    hook, _ = stop_by_checkpoint(tmp_path, 0.05, save_at=-1)
    (end,) = open_run(hook.run_url).ends()
    message = "no checkpoint was saved after the stop was requested (time limit exceeded)"
    assert (end.state, end.reason) == ("stopped", f"a rule fired; {message}")
    assert message in capsys.readouterr().err
    assert hook.health["notes"]["on_stop"] == message


@pytest.mark.ci
def test_a_function_that_cannot_save_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_ON_STOP", "checkpoint")

    def save(_: StopRequest) -> None:
        raise OSError("disk full")

    hook, training = stopping(tmp_path, 5, on_stop=save)
    train_until_stopped(hook, training)
    (end,) = open_run(hook.run_url).ends()
    assert end.reason.endswith("no checkpoint was saved after the stop was requested (OSError: disk full)")
    assert "disk full" in hook.health["faults"]["on_stop"]


def test_a_function_is_called_once(tmp_path: Path) -> None:
    requests: list[StopRequest] = []
    hook, training = stopping(tmp_path, 0, on_stop=requests.append)
    while not requests:
        training.run(10)
    training.run(10)
    hook.close()
    assert [request.reason for request in requests] == ["a rule fired"]


def test_what_a_function_raises_ends_the_training(tmp_path: Path) -> None:
    def end(_: StopRequest) -> None:
        raise LookupError("ended by the program")

    hook, training = stopping(tmp_path, 0, on_stop=end)
    with pytest.raises(LookupError, match="ended by the program"):
        training.run(5_000)
    hook.close()
    assert open_run(hook.run_url).ends()[0].state == "stopped"
    assert not hook.health["faults"]


class Interrupts:
    """A value of the program, during whose conversion a signal arrives."""

    def __float__(self) -> float:
        signal.raise_signal(signal.SIGUSR1)
        return 1.0

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.full(1, float(self))

    def state_dict(self) -> dict[str, float]:
        return {"value": float(self)}


@pytest.mark.parametrize("where", ["log", "record", "bundle"])
@pytest.mark.parametrize("replaces_itself", [False, True])
def test_what_a_signal_handler_raises_in_the_recorders_work_is_not_contained(
    tmp_path: Path, where: str, replaces_itself: bool
) -> None:
    def handler(*_: Any) -> None:
        if replaces_itself:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise TimeoutError("of the program")

    def work() -> None:
        if where == "bundle":
            hook.bundle()
            training.run(3)
        elif where == "log":
            hook.log(value=Interrupts())
        else:
            hook.record(value=Interrupts())

    hook, training = watched_training(tmp_path, run="r", config=EVERY_STEP)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        training.run(2)
        hook.include_in_bundles(value=Interrupts())
        with pytest.raises(TimeoutError, match="of the program"):
            work()
    finally:
        signal.signal(signal.SIGUSR1, before)
    training.run(2)
    hook.close()
    assert hook.health["faults"] == {}


@pytest.mark.ci
def test_a_tombstone_stops_a_new_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a2")
    hook, training = stopping(tmp_path, 500)
    assert "stopped earlier" in str(train_until_stopped(hook, training))


def run_program(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(
        f"from watchstep import Hook\nhook = Hook({str(tmp_path)!r}, run='r')\n{textwrap.dedent(body)}"
    )
    return subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=600)


UNTIL_WRITTEN = """
    import time
    while not hook.health["counts"].get("objects"):  # as in any program that runs for a second
        hook.log(loss=1.0)
        hook.step()
        time.sleep(0.01)
    raise KeyboardInterrupt
    """


@pytest.mark.ci
@pytest.mark.parametrize(
    ("body", "code", "error", "state", "reason"),
    [
        ("hook.log(loss=1.0)\nhook.step()\n", 0, "", "completed", ""),
        ("raise RuntimeError('boom')\n", 1, "RuntimeError: boom\n", "failed", "RuntimeError: boom"),
        (UNTIL_WRITTEN, -2, "KeyboardInterrupt\n", "failed", "KeyboardInterrupt"),
    ],
    ids=["forgets to close", "raises", "is interrupted"],
)
def test_a_program_that_does_not_close_its_hook_ends_as_without_it(
    tmp_path: Path, body: str, code: int, error: str, state: str, reason: str
) -> None:
    done = run_program(tmp_path, body)
    assert done.returncode == code
    assert done.stderr.endswith(error)
    assert (done.stderr == "") == (code == 0)
    run = open_run(tmp_path / "default" / "r")
    assert [(end.state, end.reason) for end in run.ends()] == [(state, reason)]
    assert code != 0 or run.steps() == [0]


@pytest.mark.ci
def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        """
        import os
        hook.log(loss=1.0)
        child = os.fork()
        if child == 0:
            hook.log(loss=2.0)
            hook.step()
            hook.close()
            raise SystemExit
        os.waitpid(child, 0)
        hook.step()
        """,
    )
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "default" / "r")
    assert run.losses()["value"].to_pylist() == [1.0]
    assert len(run.ends()) == 1


def test_names_that_are_too_long_are_shortened_and_reported(tmp_path: Path) -> None:
    names = ["loss" + "n" * 5_000_000 + end for end in "ab"]
    with Hook(tmp_path, config=QUICK) as hook:
        for _ in range(3):
            hook.log(dict.fromkeys(names, 1.0), accuracy=0.5)
            hook.step()
    run = open_run(hook.run_url)
    assert run.damaged == {}
    assert sorted(name[:10] for name in run.tensors()) == ["accuracy", "lossnnnnnn", "lossnnnnnn"]
    assert run.losses().num_rows == 6
    assert hook.health["counts"]["shortened_names"] == 2
    assert "the names of 2 tensors exceed 4096 bytes" in hook.health["notes"]["names"]
    assert max(file.stat().st_size for file in Path(tmp_path).rglob("*.arrow")) < 100_000


@pytest.mark.parametrize("run", ["NoSuchBucket", "no-such-folder", "os-error-20"])
def test_a_run_may_be_named_as_an_error_is(tmp_path: Path, run: str) -> None:
    with Hook(tmp_path, run=run, config=QUICK) as hook:
        hook.log(loss=1.0)
        hook.step()
    assert hook.health["faults"] == {}
    assert open_run(hook.run_url).losses().num_rows == 1


def test_a_run_that_is_recorded_again_from_its_first_step_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WATCHSTEP_ATTEMPT")
    reports = []
    for first_step in (0, 0, 5):
        with Hook(tmp_path, run="r", first_step=first_step) as hook:
            hook.log(loss=1.0)
            hook.step()
        reports.append(hook.health["notes"].get("earlier_attempts", ""))
    assert reports[0] == reports[2] == ""
    assert "run default/r has an earlier attempt" in reports[1]
    assert sum("earlier attempt" in record.message for record in caplog.records) == 1
