"""Programs under ``torchrun`` and ``accelerate launch``: stopped at one step in all ranks, and otherwise as without Watchstep."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.estimator.launches import PROGRAM, Place, launch, place
from watchstep_launch import Estimator, Local

pytestmark = pytest.mark.ci

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
