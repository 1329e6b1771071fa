"""However a process ends, it ends as without a recorder, and its rows are on the store or reported as missing."""

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
from tests.sdk.store.faulty_s3 import FaultyS3
from watchstep import open_run
from watchstep.capture.upload.uploader import spill_folders, sync
from watchstep.format.documents import EndDocument

STEPS = 30
BEGINNING = f"""
import os, signal, sys, threading, time
from watchstep import Bounds, CaptureConfig, Hook

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def record(hook, steps={STEPS}):
    for step in range(steps):
        hook.log(loss=float(step))
        hook.step()

def ready():
    print("ready", flush=True)

def wait():
    while True:
        time.sleep(0.05)  # a signal that comes just before a sleep is handled after it
"""
A_HOOK = "hook = Hook(run='r', config=CaptureConfig(bounds=Bounds(flush_seconds=60.0)))\n"


@contextmanager
def program(folder: Path, body: str, beginning: str = BEGINNING + A_HOOK) -> Iterator[subprocess.Popen[str]]:
    """A program that has printed that it is ready."""
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
        started.communicate(timeout=600)


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


RECORDS_AND_WAITS = "record(hook)\nready()\nwait()\n"
EXITS = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
RETURNS = """
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
"""
CONTINUES = """
record(hook, 10)
ready()
while not signals:
    time.sleep(0.01)
record(hook, 20)
"""
NEVER_RETURNS_TO_PYTHON = """
import ctypes
record(hook)
mutex = (ctypes.c_char * 64)()
lock = ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
ready()
lock(mutex)  # for ever, and no signal interrupts it
"""
LEAVES = "leave, leave_by_exception = os._exit, sys.exit\n"
IS_RESTORED = """
assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
record(hook)
hook.close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.set_wakeup_fd(-1) == -1
assert os._exit is leave
assert sys.exit is leave_by_exception
ready()
wait()
"""
BY_SIGTERM = {  # handler, body; exit code, state, reason
    "by default": ("", RECORDS_AND_WAITS, -signal.SIGTERM, "failed", "SIGTERM"),
    "twice": ("", RECORDS_AND_WAITS, -signal.SIGTERM, "failed", "SIGTERM"),
    "main thread never returns to Python": (
        "", NEVER_RETURNS_TO_PYTHON, -signal.SIGTERM, "failed", "SIGTERM",
    ),
    "handled": (EXITS, RECORDS_AND_WAITS, 7, "failed", "SIGTERM"),
    "handled by a later handler": ("", EXITS + RECORDS_AND_WAITS, 7, "failed", "SystemExit: 7"),
    "handled, and the program continues": (RETURNS, CONTINUES + "hook.close()", 0, "completed", ""),
    "handled, and nothing is closed": (RETURNS, CONTINUES, 0, "completed", ""),
    "handled, and an exception": (
        RETURNS, CONTINUES + "raise ValueError('boom')", 1, "failed", "SIGTERM; ValueError: boom",
    ),
    "handled, and exit 0": (
        RETURNS, CONTINUES + "hook.__exit__(SystemExit, SystemExit(0), None)", 0, "completed", "",
    ),
    "handled, and exit 3": (
        RETURNS,
        CONTINUES + "hook.__exit__(SystemExit, SystemExit(3), None)",
        0,
        "failed",
        "SIGTERM; SystemExit: 3",
    ),
    "after the hook is closed": (LEAVES, IS_RESTORED, -signal.SIGTERM, "completed", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_SIGTERM)
def test_sigterm_ends_a_program_as_without_a_recorder(tmp_path: Path, store: Path, case: str) -> None:
    handler, body, code, state, reason = BY_SIGTERM[case]
    with program(tmp_path, body, BEGINNING + handler + A_HOOK) as started:
        started.terminate()
        if case == "twice":
            started.terminate()
        assert started.wait(60) == code
    assert_all_there(store, state, reason)


def test_sigterm_while_the_main_thread_has_the_recorders_locks(tmp_path: Path, store: Path) -> None:
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


def test_sigterm_that_the_program_ignores(tmp_path: Path, store: Path) -> None:
    beginning = BEGINNING + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + A_HOOK
    with program(tmp_path, "record(hook)\nready()\nsys.stdin.readline()\n", beginning) as started:
        started.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(0.5)


CAUGHT_BEFORE_FURTHER_STEPS = """
try:
    sys.exit(2)  # as a parser of arguments does
except SystemExit:
    pass
record(hook, 1)
raise SystemExit(0)
"""
EXITS_BY_ITSELF = {
    "sys.exit(3)": (3, "SystemExit: 3"),
    "(lambda: sys.exit(3))()": (3, "SystemExit: 3"),
    "sys.exit('no data')": (1, "SystemExit: no data"),
    "exit(4)": (4, "SystemExit: 4"),
    "sys.exit(0)": (0, ""),
    "sys.exit()": (0, ""),
    "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass": (0, ""),
    "try:\n    sys.exit(3)\nexcept SystemExit:\n    sys.exit()": (0, ""),
    CAUGHT_BEFORE_FURTHER_STEPS: (0, ""),
    "threading.Thread(target=sys.exit, args=(3,)).start()": (0, ""),
    "hook.close()\nsys.exit(3)": (3, ""),
    "raise SystemExit(3)": (3, ""),  # nothing in the process can tell its code
    "os._exit(3)": (3, "os._exit(3)"),
    "os._exit(0)": (0, ""),
}


@pytest.mark.parametrize("exits", EXITS_BY_ITSELF)
def test_an_exit_code_states_how_the_program_ended(tmp_path: Path, store: Path, exits: str) -> None:
    code, reason = EXITS_BY_ITSELF[exits]
    steps = STEPS - 1 if exits == CAUGHT_BEFORE_FURTHER_STEPS else STEPS
    with program(tmp_path, f"record(hook, {steps})\nready()\n{exits}\n") as started:
        assert started.wait(60) == code
    assert_all_there(store, "failed" if reason else "completed", reason)


@pytest.fixture
def stalling(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    server.fault = "stall"
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
    return server


SHORT_TERM = (
    BEGINNING + "hook = Hook(config=CaptureConfig(bounds=Bounds(term_seconds=1.0, close_seconds=600.0)))\n"
)


def uploaded(server: FaultyS3, spill_root: Path) -> EndDocument:
    """Sync the spill folder once the store answers: all steps are there. Returns how the program ended."""
    assert spilled(spill_root)
    server.fault = "none"
    server.released.set()
    (folder,) = spill_folders(spill_root)
    assert sync(folder).why == ""
    found = on_server(server)
    assert found.steps == list(range(STEPS))
    (end,) = found.ends
    assert end.last_step == STEPS - 1
    return end


@pytest.mark.parametrize(
    ("body", "states"),
    [
        (RECORDS_AND_WAITS, {"failed"}),
        ("record(hook)\nready()\nhook.close()\n", {"completed", "failed"}),  # whichever came first
        ("record(hook)\nready()\n", {"completed", "failed"}),
    ],
    ids=["while it trains", "while the hook is being closed", "while the interpreter shuts down"],
)
def test_sigterm_while_the_store_stalls(
    tmp_path: Path, stalling: FaultyS3, spill_root: Path, body: str, states: set[str]
) -> None:
    with program(tmp_path, body, SHORT_TERM) as started:
        assert stalling.met.wait(60)
        started.terminate()
        assert started.wait(30) == -signal.SIGTERM
    end = uploaded(stalling, spill_root)
    assert end.state in states
    assert end.reason == "SIGTERM" or states != {"failed"}


ON_CLOSING = """
def send_while_closing(number):
    def send():
        while not hook._ending._writer._closing.is_set():
            time.sleep(0.001)
        os.kill(os.getpid(), number)
    threading.Thread(target=send, daemon=True).start()
"""
CLOSES = """
def close(*_):
    print("received", flush=True)
    send_while_closing(signal.SIGTERM)
    hook.close()
    sys.exit(3)
signal.signal(signal.SIGTERM, close)
"""
A_SLOW_HOOK = SHORT_TERM.removeprefix(BEGINNING)
in_both_orders = pytest.mark.parametrize("hook_first", [False, True], ids=["handler-first", "hook-first"])


def with_handler(handler: str, *, hook_first: bool) -> str:
    parts = (A_SLOW_HOOK, handler) if hook_first else (handler, A_SLOW_HOOK)
    return BEGINNING + ON_CLOSING + "".join(parts)


@in_both_orders
def test_a_second_sigterm_while_the_handler_closes_the_hook(
    tmp_path: Path, stalling: FaultyS3, spill_root: Path, *, hook_first: bool
) -> None:
    beginning = with_handler(CLOSES, hook_first=hook_first)
    with program(tmp_path, "record(hook)\nready()\nwait()\n", beginning) as started:
        assert stalling.met.wait(60)
        started.terminate()
        assert started.wait(60) == 3
        assert started.stdout is not None
        assert started.stdout.read() == "received\n"
    uploaded(stalling, spill_root)


@in_both_orders
@pytest.mark.parametrize("ending", ["hook.close()", "pass"], ids=["closing", "at-exit"])
def test_a_second_sigterm_while_the_program_ends_loses_nothing(
    tmp_path: Path, stalling: FaultyS3, spill_root: Path, ending: str, *, hook_first: bool
) -> None:
    body = f"""
        record(hook)
        try:
            ready()
            wait()
        finally:
            send_while_closing(signal.SIGTERM)
            {ending}
        """
    with program(tmp_path, body, with_handler(EXITS, hook_first=hook_first)) as started:
        assert stalling.met.wait(60)
        started.terminate()
        assert started.wait(60) == 7
        assert started.stderr is not None
        assert "Traceback" not in started.stderr.read()
    uploaded(stalling, spill_root)


@in_both_orders
def test_a_first_sigterm_while_the_hook_is_closed_reaches_the_program_after_it(
    tmp_path: Path, stalling: FaultyS3, spill_root: Path, *, hook_first: bool
) -> None:
    body = "record(hook)\nready()\nsend_while_closing(signal.SIGTERM)\nhook.close()\nwait()\n"
    with program(tmp_path, body, with_handler(EXITS, hook_first=hook_first)) as started:
        assert started.wait(60) == 7
    end = uploaded(stalling, spill_root)
    assert end.state == "completed"


def test_a_sigterm_while_an_exception_ends_the_program_keeps_its_exit_code(
    tmp_path: Path, stalling: FaultyS3, spill_root: Path
) -> None:
    body = "record(hook)\nready()\nsend_while_closing(signal.SIGTERM)\nraise ValueError('boom')\n"
    with program(tmp_path, body, with_handler(EXITS, hook_first=False)) as started:
        assert started.wait(60) == 1
        assert started.stderr is not None
        assert "ValueError: boom" in started.stderr.read()
    end = uploaded(stalling, spill_root)
    assert (end.state, end.reason) == ("failed", "ValueError: boom")


@pytest.mark.parametrize("ending", ["hook.close()", "pass"], ids=["closing", "at-exit"])
def test_a_sigterm_whose_handler_exits_leaves_less_time_than_a_close(
    tmp_path: Path, stalling: FaultyS3, spill_root: Path, ending: str
) -> None:
    body = f"""
        hook.checkpoint_saved("checkpoint", 0)
        record(hook)
        try:
            ready()
            wait()
        finally:
            {ending}
        """
    with program(tmp_path, body, with_handler(EXITS, hook_first=False)) as started:
        assert stalling.met.wait(60)
        started.terminate()
        assert started.wait(60) == 7  # closing alone would wait for 600 s
    uploaded(stalling, spill_root)


def test_ctrl_c_while_the_hook_is_closed_leaves_the_rest_on_disk(
    tmp_path: Path, stalling: FaultyS3, spill_root: Path
) -> None:
    body = """
        record(hook)
        try:
            ready()
            wait()
        finally:
            send_while_closing(signal.SIGINT)
            hook.close()
        """
    with program(tmp_path, body, BEGINNING + ON_CLOSING + A_SLOW_HOOK) as started:
        started.send_signal(signal.SIGINT)
        assert started.wait(60) == -signal.SIGINT
    uploaded(stalling, spill_root)


def test_no_thread_of_a_recorder_runs_text_as_code(tmp_path: Path, stalling: FaultyS3) -> None:
    """Python then forgets that Ctrl-C has ended the program, and exits with 1. Imports of boto3 do so."""
    audited = """
texts = []
def audit(event, arguments):
    if event == "compile" and threading.current_thread() is not threading.main_thread():
        texts.append(arguments[0])
sys.addaudithook(audit)
"""
    body = "record(hook)\nready()\nsys.stdin.readline()\nprint(texts, flush=True)\nwait()\n"
    with program(tmp_path, body, BEGINNING + audited + A_SLOW_HOOK) as started:
        assert stalling.met.wait(60)
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write("\n")
        started.stdin.flush()
        assert started.stdout.readline() == "[]\n"


@pytest.mark.parametrize(("ends", "code"), [("os._exit(3)", 3), ("raise ValueError('boom')", 1)])
def test_a_program_that_ends_by_itself_while_the_store_stalls(
    tmp_path: Path, stalling: FaultyS3, spill_root: Path, ends: str, code: int
) -> None:
    beginning = SHORT_TERM if code == 3 else SHORT_TERM.replace("600.0", "0.5")
    with program(tmp_path, f"record(hook)\nready()\n{ends}\n", beginning) as started:
        assert started.wait(30) == code
    end = uploaded(stalling, spill_root)
    assert (end.state, end.reason) == ("failed", "os._exit(3)" if code == 3 else "ValueError: boom")


def test_sigkill_leaves_what_was_flushed(tmp_path: Path, store: Path) -> None:
    body = """
        step = 0
        ready()
        while True:
            hook.log(loss=float(step))
            hook.step()
            step += 1
            time.sleep(0.0002)  # a loop that outruns the writer has rows dropped, which is another test's
        """
    beginning = "import time\n" + BEGINNING + A_HOOK.replace("60.0", "0.001")
    with program(tmp_path, body, beginning) as started:
        while len(list(store.rglob("*.arrow"))) < 5:
            assert started.poll() is None
        started.kill()
        assert started.wait(60) == -signal.SIGKILL
    steps, ends = recorded(store)
    assert len(steps) > 0
    assert steps == list(range(len(steps)))
    assert ends == []


def test_sigkill_while_the_store_is_missing_leaves_spilled_rows(
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


@pytest.mark.parametrize(
    ("child", "status"),
    [
        ("os._exit(5)", "os.WEXITSTATUS(status) == 5"),
        ("signal.pause()", "os.WTERMSIG(status) == signal.SIGTERM"),
        ("hook.log(loss=-1.0); hook.close(); os._exit(0)", "os.WEXITSTATUS(status) == 0"),
    ],
)
def test_a_forked_child_ends_as_without_a_recorder_and_its_parent_continues(
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
        read_end, write_end = os.pipe()
        if not os.fork():
            os.write(write_end, b"!")  # what it does on being forked is done
            os.closerange(1, 3)
            sys.stdin.read()
            os._exit(0)
        os.read(read_end, 1)
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
