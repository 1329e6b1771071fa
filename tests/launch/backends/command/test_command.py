"""Backends that are commands of a scheduler."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import Bench
from tests.launch.backends.kubernetes.small_cluster import running_cluster
from tests.processes import traced_memory
from watchstep.errors import ConfigError
from watchstep_launch.backend import (
    IN_SERVICE,
    BackendDownError,
    CredentialsExpiredError,
    JobHandle,
    Launch,
    SubmissionRejectedError,
    open_backend,
)
from watchstep_launch.backends.command import Command, CommandResult, TimedOutError, run, words

pytestmark = pytest.mark.ci

STATES = {"RUNNING": "running", "ENDED": "ended", "VANISHED": "vanished"}
HANGS_SECONDS = 60.0
"""After which a call counts as one that does not return."""


def cluster(own: str = "false", /, **more: object) -> Command:
    settings = {
        "submit_command": f"{own} submit {{name}} {{command}}",
        "status_command": f"{own} status {{id}}",
        "stop_command": f"{own} stop {{id}}",
        "kill_command": f"{own} kill {{id}}",
        "logs_command": f"{own} logs {{id}}",
        "jobs_command": f"{own} jobs",
        "find_command": f"{own} find {{name}}",
        "id_pattern": r"job (\d+)",
        "started_pattern": r"started=(\d+)",
        "exit_code_pattern": r"code=(-?\d+)",
        "states": STATES,
        "state_codes": {3: "vanished"},
        "down_pattern": "unreachable",
        "expired_pattern": "has expired",
        "timeout_seconds": 30.0,
        **more,
    }
    return Command.model_validate(settings)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with running_cluster(tmp_path) as command:
        held = Bench(cluster(command), tmp_path)
        yield held
        held.close()


@pytest.mark.ci
def test_a_cluster_that_is_down_and_credentials_that_expired_are_told_apart(bench: Bench) -> None:
    job = bench.launch("import signal; signal.pause()")
    for name, error in (("down", BackendDownError), ("expired", CredentialsExpiredError)):
        (bench.folder / name).touch()
        for call in (bench.backend.status, bench.backend.stop, bench.backend.logs):
            with pytest.raises(error):
                call(job)
        with pytest.raises(error):
            bench.launch("pass")
        (bench.folder / name).unlink()
    assert bench.backend.status(job).state == "running"


def test_a_submission_without_an_answer_is_looked_for_by_its_name(tmp_path: Path) -> None:
    launch = Launch(("true",), {}, tmp_path, name="ws-lost")
    hangs = "sh -c 'sleep 600'"
    lost = cluster(submit_command=hangs, find_command="", timeout_seconds=0.2)
    with pytest.raises(BackendDownError, match="'ws-lost' may have been started"):
        lost.submit(launch)
    none = cluster(submit_command=hangs, find_command="true {name}", timeout_seconds=0.5)
    with pytest.raises(BackendDownError, match="job 'ws-lost' was not started"):
        none.submit(launch)
    found = cluster(
        submit_command="sh -c 'echo; sleep 600'", find_command="echo 17", started_pattern="",
        timeout_seconds=0.5,
    )  # fmt: skip
    assert found.submit(launch) == JobHandle("command", "17", {})


@pytest.mark.parametrize("printed", ["", "--help", "$(reboot)"])
def test_what_is_no_id_is_refused(tmp_path: Path, printed: str) -> None:
    odd = cluster(submit_command=f"printf %s '{printed}'", id_pattern=r"(\S+)$")
    with pytest.raises(SubmissionRejectedError, match="printed no id"):
        odd.submit(Launch(("true",), {}, tmp_path))
    with pytest.raises(ConfigError, match="not a valid job id"):
        odd.status(JobHandle("command", printed, {}))


def test_a_template_is_words_and_never_a_shells(tmp_path: Path) -> None:
    command = ("python", "a b", "$(x)")
    assert words("run --name={name} -- {command}", {"name": "n; rm"}, command) == [
        "run", "--name=n; rm", "--", *command,
    ]  # fmt: skip
    assert words("sh -c '{command_line}'", {}, command) == ["sh", "-c", "python 'a b' '$(x)'"]
    for wrong in ("run {nothing}", "run 'open", "", "run {0}"):
        with pytest.raises(ConfigError):
            words(wrong, {"id": "1"})
    with pytest.raises(SubmissionRejectedError, match="no-such-cluster"):
        cluster(submit_command="no-such-cluster {command}").submit(Launch(command, {}, tmp_path))


@pytest.mark.parametrize(
    "wrong",
    [{"id_pattern": "("}, {"id_pattern": "x"}, {"states": {"(": "running"}}, {"states": {"x": "odd"}}],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        cluster(**wrong)


def test_a_services_admin_cannot_register_commands() -> None:
    assert "command" not in IN_SERVICE
    with pytest.raises(ConfigError, match="submit_command"):
        open_backend("command", {})


@contextmanager
def left_behind(folder: Path, then: str, seconds: float) -> Iterator[Future[CommandResult]]:
    """A command whose child, in a session of its own, holds both outputs until the block is left."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR)
    script = f'exec 3<"$0"; setsid cat <&3 & {then}'
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(run, ["sh", "-c", script, str(pipe)], seconds, folder, {})
        finally:
            os.close(end)


def test_a_command_has_ended_though_its_child_holds_its_outputs(tmp_path: Path) -> None:
    with left_behind(tmp_path, "echo running; echo odd >&2; exit 7", HANGS_SECONDS) as answer:
        assert answer.result(HANGS_SECONDS / 2) == CommandResult(7, b"running\n", "odd\n")


def test_a_command_is_ended_in_time_though_its_child_holds_its_outputs(tmp_path: Path) -> None:
    with (
        left_behind(tmp_path, "exec sleep 600", 1.0) as answer,
        pytest.raises(TimedOutError, match=r"no answer in 1 s\n"),
    ):
        answer.result(HANGS_SECONDS / 2)


@pytest.mark.parametrize("begin", ["", "setsid "])
def test_no_process_that_descends_from_a_command_outlives_its_time(tmp_path: Path, begin: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Each process holds the pipe: it ends when all are gone.
    script = f'exec 3>"$0"; {begin}sh -c \'sh -c "echo up >&3; exec sleep 600"; true\' & exec sleep 600'
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(run, ["sh", "-c", script, str(pipe)], 2.0, tmp_path, {})
        with pipe.open("rb", buffering=0) as reader:
            assert isinstance(answer.exception(HANGS_SECONDS), TimedOutError)
            part = b"up"
            while part:
                assert select.select([reader], [], [], HANGS_SECONDS)[0], "a process has outlived it"
                part = reader.read(100)


def test_a_command_that_closes_its_outputs_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(TimedOutError):
        run(["sh", "-c", "exec >&- 2>&-; exec sleep 600"], 0.5, tmp_path, {})
    assert run(["sh", "-c", "exec >&- 2>&-; exit 3"], HANGS_SECONDS, tmp_path, {}) == CommandResult(
        3, b"", ""
    )


def test_no_more_of_an_output_is_kept_than_is_returned(tmp_path: Path) -> None:
    with traced_memory() as memory:
        answer = run(["head", "-c", "200000000", "/dev/zero"], HANGS_SECONDS, tmp_path, {})
    assert answer.output == bytes(16 * 1024 * 1024)
    assert memory.peak < 100_000_000
