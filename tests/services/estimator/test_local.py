from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.services.jobs import STUBBORN, WILLING, eventually, launch
from watchstep.errors import ConfigError, NotFoundError
from watchstep_services.estimator.backend import ChecksOwner, JobHandle, Launch
from watchstep_services.estimator.errors import BackendError
from watchstep_services.estimator.local import Local, identity_of, job_of_pid


@pytest.fixture
def backend() -> Local:
    return Local()


def gone(backend: Local, job: JobHandle) -> None:
    eventually(lambda: backend.status(job).is_over)


def test_a_job_runs_in_its_own_session_with_its_log(backend: Local, tmp_path: Path) -> None:
    command = (
        sys.executable,
        "-c",
        "import os; print(os.getsid(0) == os.getpid(), os.environ['X']); exit(3)",
    )
    job = backend.submit(Launch(command, {**os.environ, "X": "y"}, tmp_path, tmp_path / "log"))
    gone(backend, job)
    assert backend.status(job).exit_code == 3
    assert (tmp_path / "log").read_text() == "True y\n"
    assert backend.stop(job).is_over


def test_a_missing_program_is_told(backend: Local, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-program"):
        backend.submit(Launch(("no-such-program",), {}, tmp_path, tmp_path / "log"))


def test_stop_and_kill(backend: Local, tmp_path: Path) -> None:
    willing = launch(backend, tmp_path, WILLING, "willing")
    stubborn = launch(backend, tmp_path, STUBBORN, "stubborn")
    backend.stop(willing)
    backend.stop(stubborn)
    gone(backend, willing)
    assert backend.status(willing).exit_code == -signal.SIGTERM
    assert backend.status(stubborn).state == "running"
    backend.kill(stubborn)
    gone(backend, stubborn)
    assert backend.status(stubborn).exit_code == -signal.SIGKILL


def test_children_are_reaped(backend: Local, tmp_path: Path) -> None:
    job = launch(backend, tmp_path, WILLING)
    backend.stop(job)
    eventually(lambda: not Path(f"/proc/{job.id}").exists())


def test_a_group_ends_with_its_leader(backend: Local, tmp_path: Path) -> None:
    program = (
        "import pathlib, signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "signal.pause()"
    )
    job = launch(backend, tmp_path, program)
    child = job_of_pid(int((tmp_path / "child").read_text()))
    backend.kill(job)
    gone(backend, job)
    gone(backend, child)


def test_a_process_that_another_started(backend: Local) -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as child:
        job = job_of_pid(child.pid)
        assert backend.status(job).state == "running"
        backend.kill(job)
        assert child.wait() == -signal.SIGKILL
    assert backend.status(job) == backend.kill(job)
    assert backend.status(job).state == "vanished"
    with pytest.raises(NotFoundError):
        job_of_pid(child.pid)


@pytest.mark.parametrize(
    "change",
    [{"start_ticks": 1}, {"boot": "another-boot"}, {"boot": "another-boot", "host": "another-host"}],
)
def test_another_process_with_the_same_id_is_never_signalled(
    backend: Local, tmp_path: Path, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launch(backend, tmp_path, WILLING)
    other = replace(job, identity={**job.identity, **change})

    def signalled(*_arguments: object) -> None:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(signal, "pidfd_send_signal", signalled)
        patch.setattr(os, "killpg", signalled)
        state = backend.status(other).state
        assert state == ("unknown" if "host" in change else "vanished")
        assert backend.stop(other).state == state
        assert backend.kill(other).state == state
    assert backend.status(job).state == "running"
    backend.kill(job)
    gone(backend, job)


def test_an_identity_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="pid"):
        identity_of(JobHandle("local", "1", {"uid": "x"}))


def test_whose_process_it_is_decides_whether_it_may_be_stopped(backend: Local, tmp_path: Path) -> None:
    assert isinstance(backend, ChecksOwner)
    job = launch(backend, tmp_path, WILLING)
    backend.check_may_stop(job)
    first = job_of_pid(1)
    if os.geteuid() == Path("/proc/1").stat().st_uid != 0:
        pytest.skip("every process here is this user's")
    if os.geteuid() == 0:
        backend.check_may_stop(first)  # root may
        os.seteuid(65534)
    try:
        with pytest.raises(BackendError, match="job local:1: is user"):
            backend.check_may_stop(first)
    finally:
        os.seteuid(os.getuid())
    backend.kill(job)
    gone(backend, job)
    eventually(lambda: not Path(f"/proc/{job.id}").exists())
    backend.check_may_stop(job)  # whoever stops it sees that it has ended
