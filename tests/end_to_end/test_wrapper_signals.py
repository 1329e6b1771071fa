"""SIGTERM and SIGINT sent to ``watchstep run -- torchrun …`` and to ``accelerate launch``: they end as without Watchstep."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.end_to_end.test_wrappers import BIN, WRAPPERS
from tests.services.jobs import eventually
from watchstep import open_run

pytestmark = pytest.mark.ci

SECONDS = 120.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)

TRAIN = """
import os, pathlib, signal, sys, time
import torch

rank = int(os.environ["RANK"])

def asked(number, frame):
    os.write(1, f"rank {rank} was asked by signal {number}\\n".encode())
    sys.exit(5)

if rank == 0:  # the other one leaves it to the default
    signal.signal(signal.SIGTERM, asked)
    signal.signal(signal.SIGINT, asked)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
while True:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    step += 1
    if step == 5:
        pathlib.Path(sys.argv[1], f"{rank}.ready").touch()
    time.sleep(0.01)
"""
_VARIES = re.compile(r"0x[0-9a-f]+|\d\d\d\d-\d\d-\d\d|\d+")
_TOLD = re.compile(r"rank \d|\S*(Interrupt|Exception|Error)\b|.*closing signal")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WATCHSTEP_")]:
        monkeypatch.delenv(name)


def ended_by(number: int, words: list[str], folder: Path) -> tuple[int, Counter[str]]:
    """The exit code of a command that gets a signal once both its ranks train, and what it and they told of it."""
    folder.mkdir()
    with (folder / "output").open("wb") as output:
        started = subprocess.Popen(
            [*words, str(folder)], cwd=folder.parent, stdout=output, stderr=output, start_new_session=True
        )
    try:
        ready = [folder / f"{rank}.ready" for rank in (0, 1)]
        eventually(lambda: all(one.exists() for one in ready) or started.poll() is not None, SECONDS)
        started.send_signal(number)
        code = started.wait(SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    said = (folder / "output").read_text(errors="replace")
    told = (line.strip() for line in said.splitlines())
    return code, Counter(_VARIES.sub("N", line) for line in told if _TOLD.match(line))


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_signal_ends_ranks_and_wrapper_as_without_watchstep(
    wrapper: str, number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = [*shlex.split(WRAPPERS[wrapper]), "train.py"]
    recorded = [str(BIN / "watchstep"), "run", "--store", "store", "--run", "night", "--", *words]
    code, told = ended_by(number, words, tmp_path / "plain")
    assert code != 0
    assert told["rank N was asked by signal N"] == 1
    assert ended_by(number, recorded, tmp_path / "recorded") == (code, told)
    run = open_run(str(tmp_path / "store" / "default" / "night"))
    assert (run.state(), run.workers) == ("failed", [0, 1])
