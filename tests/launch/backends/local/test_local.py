"""Jobs that are processes of this machine."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import Bench
from tests.services.jobs import STUBBORN, WILLING, eventually, launch
from watchstep.errors import ConfigError, NotFoundError
from watchstep.platform.process import record_process
from watchstep_launch.backend import BackendError, ChecksOwner, JobHandle, Launch
from watchstep_launch.backends.local.backend import Local, identity_of, job_of, job_of_pid


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


NOTES_SIGNALS = """
import pathlib, signal, subprocess, sys
received = 0
child = None
def note(*_):
    global received
    received += 1
    pathlib.Path(f"{sys.argv[1]}.{received}").touch()
def end(*_):
    if child is not None:
        child.send_signal(signal.SIGWINCH)
        child.wait()
    sys.exit(received)
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGWINCH, end)  # its number is higher: a SIGTERM that waits is handled before it
if len(sys.argv) > 2:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], "child"])
    while not pathlib.Path("child").exists():
        pass
pathlib.Path(sys.argv[1]).touch()
while True:
    signal.pause()
"""


@pytest.mark.parametrize("by_id", [False, True], ids=["by-descriptor", "by-group-id"])
def test_each_process_of_a_job_receives_one_sigterm(
    backend: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, by_id: bool
) -> None:
    send = signal.pidfd_send_signal

    def send_and_wait(descriptor: int, number: int, info: None = None, flags: int = 0) -> None:
        if flags and by_id:
            raise OSError(errno.EINVAL, "flags are not supported")  # as before Linux 6.9
        send(descriptor, number, info, flags)
        eventually((tmp_path / "job.1").exists)  # signals that wait for their handler would be merged

    monkeypatch.setattr(signal, "pidfd_send_signal", send_and_wait)
    command = (sys.executable, "-c", NOTES_SIGNALS, "job", NOTES_SIGNALS)
    job = backend.submit(Launch(command, os.environ, tmp_path, tmp_path / "log"))
    eventually((tmp_path / "job").exists)
    backend.stop(job)
    eventually((tmp_path / "job.1").exists)
    eventually((tmp_path / "child.1").exists)
    os.kill(int(job.id), signal.SIGWINCH)
    gone(backend, job)
    assert backend.status(job).exit_code == 1
    assert not list(tmp_path.glob("*.2"))


def test_a_process_that_leads_no_group_is_signalled_alone(backend: Local, tmp_path: Path) -> None:
    ready = tmp_path / "member"
    shell = ["sh", "-c", '"$@" & echo $!; wait $!', "sh", sys.executable, "-c", NOTES_SIGNALS, str(ready)]
    with subprocess.Popen(shell, stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        eventually(ready.exists)
        assert os.getpgid(pid) == leader.pid  # a signal to the group would end the shell by SIGTERM
        backend.stop(job_of(record_process(pid).identity))
        os.kill(pid, signal.SIGWINCH)
        assert leader.wait(30) == 1


def test_a_process_that_another_started(backend: Local) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as child:
        job = job_of(record_process(child.pid).identity)
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
        with pytest.raises(BackendError, match="process 1 belongs to user"):
            backend.check_may_stop(first)
    finally:
        os.seteuid(os.getuid())
    backend.kill(job)
    gone(backend, job)
    eventually(lambda: not Path(f"/proc/{job.id}").exists())
    backend.check_may_stop(job)  # whoever stops it sees that it has ended


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    held = Bench(Local(folder=tmp_path / "jobs"), tmp_path)
    yield held
    held.close()
