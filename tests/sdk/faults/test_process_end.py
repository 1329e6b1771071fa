"""However a process ends, it ends as it would have, and what it recorded is there or told of."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.sdk.faults.accounts import on_server, spilled
from tests.sdk.faulty_s3 import FaultyS3
from watchstep import open_run
from watchstep.capture.sync import spill_folders, sync
from watchstep.documents import EndDocument

STEPS = 30
BEGINNING = f"""
import os, signal, sys, threading, time
from watchstep import Bounds, CaptureConfig, Hook

def record(hook, steps={STEPS}):
    for step in range(steps):
        hook.log(loss=float(step))
        hook.step()

def ready():
    print("ready", flush=True)

def wait():
    while True:
        time.sleep(60)
"""
A_HOOK = "hook = Hook(run='r', config=CaptureConfig(bounds=Bounds(flush_seconds=60.0)))\n"


@contextmanager
def program(folder: Path, body: str, beginning: str = BEGINNING + A_HOOK) -> Iterator[subprocess.Popen[str]]:
    """A program that has said that it is ready."""
    file = folder / "program.py"
    file.write_text(beginning + textwrap.dedent(body))
    started = subprocess.Popen(
        [sys.executable, file],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        assert started.stderr is not None
        assert started.stdout.readline() == "ready\n", started.stderr.read()
        yield started
    finally:
        started.kill()
        started.communicate(timeout=60)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WATCHSTEP_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
    return tmp_path / "store"


def recorded(store: Path) -> tuple[list[int], list[EndDocument]]:
    """Steps and ends of a run of which every object is whole."""
    run = open_run(store / "default" / "r")
    assert run.damaged == {}
    return run.steps(), run.ends()


def assert_all_there(store: Path, state: str, reason: str) -> None:
    steps, (end,) = recorded(store)
    assert steps == list(range(STEPS))
    assert (end.state, end.reason, end.last_step) == (state, reason, STEPS - 1)
    assert end.segments > 0


def test_sigterm(tmp_path: Path, store: Path) -> None:
    with program(tmp_path, "record(hook)\nready()\nwait()\n") as started:
        started.terminate()
        assert started.wait(60) == -signal.SIGTERM
    assert_all_there(store, "failed", "SIGTERM")


def test_sigterm_twice(tmp_path: Path, store: Path) -> None:
    with program(tmp_path, "record(hook)\nready()\nwait()\n") as started:
        started.terminate()
        started.terminate()
        assert started.wait(60) == -signal.SIGTERM
    assert_all_there(store, "failed", "SIGTERM")


def test_sigterm_while_the_main_thread_never_returns_to_python(tmp_path: Path, store: Path) -> None:
    body = """
        import ctypes
        record(hook)
        mutex = (ctypes.c_char * 64)()
        lock = ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex)
        ready()
        lock(mutex)  # for ever, and no signal interrupts it
        """
    with program(tmp_path, body) as started:
        started.terminate()
        assert started.wait(60) == -signal.SIGTERM
    assert_all_there(store, "failed", "SIGTERM")


def test_sigterm_while_the_main_thread_holds_the_recorders_locks(tmp_path: Path, store: Path) -> None:
    body = """
        record(hook)
        with hook._health._lock, hook._recorder._queue.wake._cond:
            ready()
            wait()
        """
    beginning = BEGINNING + A_HOOK.replace("flush_seconds=60.0", "term_seconds=0.5")
    with program(tmp_path, body, beginning) as started:
        started.terminate()
        assert started.wait(60) == -signal.SIGTERM


def test_sigterm_where_the_program_handles_it(tmp_path: Path, store: Path) -> None:
    beginning = BEGINNING + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n" + A_HOOK
    with program(tmp_path, "record(hook)\nready()\nwait()\n", beginning) as started:
        started.terminate()
        assert started.wait(60) == 7
    assert_all_there(store, "failed", "SIGTERM")


def test_sigterm_where_the_program_handles_it_and_goes_on(tmp_path: Path, store: Path) -> None:
    beginning = BEGINNING + "told = []\nsignal.signal(signal.SIGTERM, lambda *_: told.append(1))\n" + A_HOOK
    body = """
        record(hook, 10)
        ready()
        while not told:
            time.sleep(0.01)
        record(hook, 20)
        hook.close()
        """
    with program(tmp_path, body, beginning) as started:
        started.terminate()
        assert started.wait(60) == 0
    assert_all_there(store, "completed", "")


def test_sigterm_where_the_program_handles_it_later(tmp_path: Path, store: Path) -> None:
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nrecord(hook)\nready()\nwait()\n"
    with program(tmp_path, body) as started:
        started.terminate()
        assert started.wait(60) == 7
    assert_all_there(store, "completed", "")


def test_sigterm_that_the_program_ignores(tmp_path: Path, store: Path) -> None:
    beginning = BEGINNING + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + A_HOOK
    with program(tmp_path, "record(hook)\nready()\nsys.stdin.readline()\n", beginning) as started:
        started.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(0.5)


def test_after_closing_the_process_is_as_it_was_found(tmp_path: Path, store: Path) -> None:
    beginning = BEGINNING + "leave = os._exit\n" + A_HOOK
    body = """
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        record(hook)
        hook.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
        assert os._exit is leave
        ready()
        wait()
        """
    with program(tmp_path, body, beginning) as started:
        started.terminate()
        assert started.wait(60) == -signal.SIGTERM
    assert_all_there(store, "completed", "")


@pytest.fixture
def stalling(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    server.fault = "stall"
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
    return server


SHORT_TERM = (
    BEGINNING + "hook = Hook(config=CaptureConfig(bounds=Bounds(term_seconds=1.0, close_seconds=600.0)))\n"
)


def uploaded(server: FaultyS3, spill_root: Path) -> list[EndDocument]:
    """What comes of the spill folder once the store answers."""
    assert spilled(spill_root)
    server.fault = "none"
    server.released.set()
    (folder,) = spill_folders(spill_root)
    assert sync(folder).why == ""
    found = on_server(server)
    assert found.steps == list(range(STEPS))
    return found.ends


def test_sigterm_while_the_store_stalls(tmp_path: Path, stalling: FaultyS3, spill_root: Path) -> None:
    with program(tmp_path, "record(hook)\nready()\nwait()\n", SHORT_TERM) as started:
        assert stalling.met.wait(60)
        started.terminate()
        assert started.wait(30) == -signal.SIGTERM
    (end,) = uploaded(stalling, spill_root)
    assert (end.state, end.reason) == ("failed", "SIGTERM")


def test_sigterm_while_the_hook_is_being_closed(tmp_path: Path, stalling: FaultyS3, spill_root: Path) -> None:
    with program(tmp_path, "record(hook)\nready()\nhook.close()\n", SHORT_TERM) as started:
        assert stalling.met.wait(60)
        started.terminate()
        assert started.wait(30) == -signal.SIGTERM
    (end,) = uploaded(stalling, spill_root)
    assert end.state in {"completed", "failed"}  # whichever came first


def test_sigterm_while_the_interpreter_shuts_down(
    tmp_path: Path, stalling: FaultyS3, spill_root: Path
) -> None:
    with program(tmp_path, "record(hook)\nready()\n", SHORT_TERM) as started:
        assert stalling.met.wait(60)
        started.terminate()
        assert started.wait(30) == -signal.SIGTERM
    uploaded(stalling, spill_root)


def test_os_exit(tmp_path: Path, store: Path) -> None:
    with program(tmp_path, "record(hook)\nready()\nos._exit(3)\n") as started:
        assert started.wait(60) == 3
    assert_all_there(store, "failed", "os._exit(3)")


def test_os_exit_with_success(tmp_path: Path, store: Path) -> None:
    with program(tmp_path, "record(hook)\nready()\nos._exit(0)\n") as started:
        assert started.wait(60) == 0
    assert_all_there(store, "completed", "")


def test_os_exit_while_the_store_stalls(tmp_path: Path, stalling: FaultyS3, spill_root: Path) -> None:
    with program(tmp_path, "record(hook)\nready()\nos._exit(3)\n", SHORT_TERM) as started:
        assert started.wait(30) == 3
    (end,) = uploaded(stalling, spill_root)
    assert (end.state, end.reason) == ("failed", "os._exit(3)")


def test_sigkill_leaves_what_was_flushed(tmp_path: Path, store: Path) -> None:
    body = """
        step = 0
        ready()
        while True:
            hook.log(loss=float(step))
            hook.step()
            step += 1
        """
    beginning = BEGINNING + A_HOOK.replace("60.0", "0.001")
    with program(tmp_path, body, beginning) as started:
        while len(list(store.rglob("*.parquet"))) < 5:
            assert started.poll() is None
        started.kill()
        assert started.wait(60) == -signal.SIGKILL
    steps, ends = recorded(store)
    assert len(steps) > 0
    assert steps == list(range(len(steps)))
    assert ends == []


def test_sigkill_while_the_store_is_gone_leaves_what_went_to_disk(
    tmp_path: Path, server: FaultyS3, spill_root: Path
) -> None:
    server.fault = "unavailable"
    beginning = SHORT_TERM.replace("term_seconds=1.0", "backlog_seconds=0.0, flush_seconds=0.01")
    body = """
        record(hook)
        hook.log(loss=0.0)  # the last of them is handed over when the next begins
        while hook.health["counts"].get("most_backlog_bytes", 0) == 0 or hook._ending._writer._backlog._memory:
            time.sleep(0.01)
        ready()
        wait()
        """
    with program(tmp_path, body, beginning) as started:
        started.kill()
        assert started.wait(60) == -signal.SIGKILL
    server.fault = "none"
    (folder,) = spill_folders(spill_root)
    assert sync(folder).why == ""
    found = on_server(server)
    assert found.steps
    assert found.steps == list(range(len(found.steps)))
    assert (found.seqs, found.ends) == (list(range(len(found.seqs))), [])


def test_an_exception_while_the_store_stalls(tmp_path: Path, stalling: FaultyS3, spill_root: Path) -> None:
    beginning = SHORT_TERM.replace("600.0", "0.5")
    with program(tmp_path, "record(hook)\nready()\nraise ValueError('boom')\n", beginning) as started:
        assert started.wait(30) == 1
    (end,) = uploaded(stalling, spill_root)
    assert (end.state, end.reason) == ("failed", "ValueError: boom")


@pytest.mark.parametrize(
    ("child", "status"),
    [
        ("os._exit(5)", "os.WEXITSTATUS(status) == 5"),
        ("signal.pause()", "os.WTERMSIG(status) == signal.SIGTERM"),
        ("hook.log(loss=-1.0); hook.close(); os._exit(0)", "os.WEXITSTATUS(status) == 0"),
    ],
)
def test_a_forked_child_ends_as_ever_and_its_parent_goes_on(
    tmp_path: Path, store: Path, child: str, status: str
) -> None:
    body = f"""
        record(hook, 10)
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            {child}
        if "pause" in {child!r}:
            os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert {status}, status
        record(hook, 20)
        hook.close()
        ready()
        """
    with program(tmp_path, body) as started:
        assert started.wait(60) == 0
    assert_all_there(store, "completed", "")


def test_the_folder_of_a_process_that_was_killed_is_free_though_a_child_of_it_lives(
    tmp_path: Path, server: FaultyS3, spill_root: Path
) -> None:
    server.fault = "unavailable"
    beginning = SHORT_TERM.replace("term_seconds=1.0", "backlog_bytes=1, flush_seconds=0.01")
    body = """
        record(hook)
        while not hook.health["counts"].get("spilled_objects"):
            time.sleep(0.01)
        if not os.fork():
            os.closerange(1, 3)
            sys.stdin.read()
            os._exit(0)
        ready()
        wait()
        """
    with program(tmp_path, body, beginning) as started:
        started.kill()
        started.wait(60)
        server.fault = "none"
        (folder,) = spill_folders(spill_root)
        assert sync(folder).why == ""
    found = on_server(server)
    assert found.seqs == list(range(len(found.seqs)))
    assert found.steps == list(range(len(found.steps)))
    assert not found.ends
