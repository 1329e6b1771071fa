"""The first process of a PID namespace, as in a container: SIGTERM has no effect on it, with and without a recorder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.services.jobs import eventually
from watchstep import open_run

SECONDS = 60.0
UNSHARE = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")

PROGRAM = """
import os, pathlib, signal, sys, time

assert os.getpid() == 1
folder, recorded = pathlib.Path(sys.argv[1]), sys.argv[2] == "recorded"
if recorded:
    from watchstep import Bounds, CaptureConfig, Hook
    hook = Hook(folder / "store", project="p", run="r", config=CaptureConfig(bounds=Bounds(flush_seconds=3600.0)))

def step(number):
    if recorded:
        hook.log(loss=float(number))
        hook.step()

for number in range(10):
    step(number)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL or recorded
(folder / "ready").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
for number in range(10, 20):
    step(number)
if recorded:
    hook.close()
print("trained to the end")
sys.exit(3)
"""


def why_not() -> str:
    """The reason why namespaces are unavailable here; empty if they are available."""
    if shutil.which("unshare") is None:
        return "NO PID NAMESPACE HERE: unshare is not installed (util-linux)"
    done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False, timeout=SECONDS)
    return f"NO PID NAMESPACE HERE: {done.stderr.strip()}" if done.returncode else ""


@pytest.fixture(scope="module", autouse=True)
def _namespace() -> None:
    if why := why_not():
        pytest.skip(why)


@contextmanager
def first_process(folder: Path, how: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The program, as the first of its namespace, once it waits; with its id out here."""
    (folder / "program.py").write_text(PROGRAM)
    started = subprocess.Popen(
        [*UNSHARE, sys.executable, str(folder / "program.py"), str(folder), how],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        eventually(lambda: (folder / "ready").exists() or started.poll() is not None, SECONDS)
        assert started.poll() is None, started.communicate()[0]
        (inside,) = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        yield started, int(inside)
    finally:
        started.kill()
        started.communicate(timeout=SECONDS)


def rows(folder: Path) -> int:
    stats = folder / "store" / "p" / "r" / "stats"
    return sum(1 for path in stats.rglob("*") if path.is_file()) if stats.exists() else 0


@pytest.mark.parametrize("how", ["plain", "recorded"])
def test_the_first_process_ends_as_without_a_recorder(how: str, tmp_path: Path) -> None:
    with first_process(tmp_path, how) as (started, inside):
        before = rows(tmp_path)
        os.kill(inside, signal.SIGTERM)
        if how == "recorded":  # what is there is safe before anybody kills it
            eventually(lambda: rows(tmp_path) > before, SECONDS)
        os.kill(inside, signal.SIGTERM)
        (tmp_path / "go").touch()
        output, _ = started.communicate(timeout=SECONDS)
    assert (started.returncode, output) == (3, "trained to the end\n")
    if how == "recorded":
        run = open_run(tmp_path / "store" / "p" / "r")
        assert (run.state(), run.steps()) == ("completed", list(range(20)))
