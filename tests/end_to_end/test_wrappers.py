"""Programs in wrappers: their recording, and signals to them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.estimator.launches import PROGRAM, Place, launch, place
from tests.services.jobs import eventually
from watchstep import open_run
from watchstep_launch import Estimator, Local

pytestmark = pytest.mark.release
BIN = Path(sys.executable).parent
WRAPPERS = {
    "torchrun": f"{BIN / 'torchrun'} --nproc-per-node=2",
    # Without a GPU "--multi_gpu" means two processes, which is what is of interest here.
    "accelerate": f"{BIN / 'accelerate'} launch --multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no"
    " --dynamo_backend=no --main_process_port=0",
}
TELLS = """
import json, os, sys
rank = int(os.environ["RANK"])
with open(f"told-{sys.argv[1]}-{rank}.json", "w") as file:
    json.dump([sys.argv[2:], os.getcwd(), os.environ.get("GIVEN"), os.environ["WORLD_SIZE"]], file)
if rank == 0:
    os.write(1, b"an output of \\xff bytes\\n")
    os.write(2, b"and errors\\n")
sys.exit(int(sys.argv[2]))
"""
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
def _plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WATCHSTEP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WATCHSTEP_JOBS", str(tmp_path / "jobs"))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_fault_is_stopped_in_all_ranks_and_a_healthy_twin_is_not(wrapper: str, tmp_path: Path) -> None:
    with place("local", tmp_path) as where:
        wrapped = Place(where.backend, f"{WRAPPERS[wrapper]} {shlex.quote(str(PROGRAM))}", where.folder)
        assert launch(wrapped, faulty=True, number=0).amiss == ()
        assert launch(wrapped, faulty=False, number=0).amiss == ()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ranks_get_what_they_would_have_without_watchstep(wrapper: str, tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    arguments = ["0", "two words", "", "$HOME *", "--store=x", "ä"]
    words = [*shlex.split(WRAPPERS[wrapper]), "tells.py"]
    plain = subprocess.run(
        [*words, "plain", *arguments], cwd=tmp_path, env={**os.environ, "GIVEN": "x y"}, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    with place("local", tmp_path) as where:
        estimator = Estimator(
            [*words, "launched"], backend=Local(), store=where.folder / "store", arguments=arguments,
            environment={"GIVEN": "x y"}, folder=tmp_path,
        )  # fmt: skip
        job = estimator.fit()
        output = b"".join(job.logs())
        assert job.status().exit_code == plain.returncode == 0, output
        for rank in (0, 1):
            told = [
                json.loads((tmp_path / f"told-{how}-{rank}.json").read_text())
                for how in ("plain", "launched")
            ]
            assert told[0] == told[1]
        for line in (b"an output of \xff bytes\n", b"and errors\n"):
            assert line in output
            assert line in plain.stdout
        failing = Estimator(
            [*words, "launched"],
            backend=Local(),
            store=where.folder / "store",
            arguments=["3"],
            folder=tmp_path,
        ).fit()
        assert failing.status().exit_code == 1  # the wrapper's own, as without Watchstep
        assert failing.run_state().info.state == "failed"


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
