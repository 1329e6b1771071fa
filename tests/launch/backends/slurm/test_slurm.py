"""Slurm, on a real cluster of this machine."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import SECONDS, TELLING, Bench
from tests.launch.backends.slurm.slurm_cluster import SlurmCluster
from tests.services.jobs import eventually
from watchstep.format.control import ControlDocument
from watchstep.format.layout import CONTROL_DOCUMENT, run_prefix
from watchstep.stopping import EXIT_TOMBSTONE
from watchstep.store.store import Store
from watchstep.wrapper.environment import LAUNCHED
from watchstep_launch.backend import BackendDownError, Launch, SubmissionRejectedError
from watchstep_launch.backends.slurm.backend import Slurm

pytestmark = pytest.mark.release


@pytest.fixture
def bench(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Bench]:
    held = Bench(Slurm(partition="all"), tmp_path)
    yield held
    held.close()


def test_tasks_on_two_nodes_find_each_other(bench: Bench) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_PORT PET_NNODES PET_NODE_RANK SLURMD_NODENAME"
    program = f"import json, os; os.write(1, (json.dumps([os.environ[n] for n in {names.split()}]) + '\\n').encode())"
    two = Bench(Slurm(partition="all", nodes=2, time="5", extra={"exclusive": None}), bench.folder)
    job = two.launch(program)
    assert two.end_of(job).exit_code == 0
    lines = sorted(json.loads(line) for line in two.output_of(job).splitlines())
    port = lines[0][4]
    assert int(port) in range(20_000, 32_768)
    assert lines == [["0", "2", "0", "1", port, "2", "0", "n1"], ["1", "2", "0", "1", port, "2", "1", "n2"]]


def test_a_rejected_submission_says_why(slurm: SlurmCluster, tmp_path: Path) -> None:
    launch = Launch(("true",), {}, tmp_path)
    for backend, why in (
        (Slurm(partition="nowhere"), "invalid partition"),
        (Slurm(constraint="nothing-has-this"), "Invalid feature"),
        (Slurm(extra={"no-such-option": "1"}), "unrecognized option"),
    ):
        with pytest.raises(SubmissionRejectedError, match=why):
            backend.submit(launch)
    assert Slurm().jobs() == []
    with pytest.raises(ValidationError):
        Slurm(partition="a\nb")


def test_a_job_that_waits_is_cancelled_by_a_stop(bench: Bench) -> None:
    held = Bench(Slurm(extra={"hold": None}), bench.folder)
    job = held.launch("pass")
    assert bench.backend.status(job).state == "queued"
    bench.backend.stop(job)
    assert held.end_of(job).state == "cancelled"


def test_secrets_are_not_in_the_script(slurm: SlurmCluster, tmp_path: Path) -> None:
    bench = Bench(Slurm(partition="all"), tmp_path)
    command = (sys.executable, "-c", "import os; print(os.environ['A_SECRET'], os.environ['GIVEN'])")
    launch = Launch(
        command, {"GIVEN": "given"}, tmp_path, name="secretive", secrets={"A_SECRET": "never tell"}
    )
    job = bench.backend.submit(launch)
    assert bench.end_of(job).exit_code == 0
    assert bench.output_of(job) == b"never tell given\n"
    script = slurm.command("scontrol", "write", "batch_script", job.id, "-")
    assert "GIVEN=given" in script
    assert "never tell" not in script


def test_a_controller_that_is_away_tells_nothing_and_the_job_goes_on(
    slurm: SlurmCluster, bench: Bench
) -> None:
    job = bench.launch(TELLING)
    slurm.stop_controller()
    with pytest.raises(BackendDownError, match="Unable to contact"):
        bench.backend.status(job)
    with pytest.raises(BackendDownError):
        bench.backend.submit(Launch(("true",), {}, bench.folder))
    slurm.start_controller(idle=False)
    assert bench.backend.status(job).state == "running"
    bench.backend.stop(job)
    assert bench.end_of(job).exit_code == 5


def test_a_job_that_the_controller_forgot_has_vanished_and_the_next_with_its_id_is_let_alone(
    slurm: SlurmCluster, bench: Bench
) -> None:
    slurm.stop_controller()
    slurm.start_controller(forget=True)
    earlier = bench.launch("pass")
    assert bench.end_of(earlier).exit_code == 0
    slurm.stop_controller()
    slurm.start_controller(forget=True)
    assert bench.backend.status(earlier).state == "vanished"
    job = bench.launch(TELLING)
    assert job.id == earlier.id
    for call in (bench.backend.stop, bench.backend.kill):
        assert call(earlier).state == "vanished"
    assert bench.backend.status(job).state == "running"


def test_what_was_stopped_stays_stopped_when_slurm_starts_it_again(slurm: SlurmCluster, bench: Bench) -> None:
    (bench.folder / "store").mkdir()
    store = Store.open(str(bench.folder / "store"))
    ready = bench.folder / "ready"
    program = "import pathlib, signal, sys; pathlib.Path(sys.argv[1]).touch(); signal.pause()"
    run = ("run", "--store", store.url, "--run", "r1", "--", sys.executable, "-c", program, str(ready))
    command = (sys.executable, "-c", "from watchstep.command import main; main()", *run)
    launch = Launch(command, {LAUNCHED: "a1"}, bench.folder, name=f"requeued-{uuid.uuid4().hex[:8]}")
    job = bench.backend.submit(launch)
    eventually(ready.exists, SECONDS)
    stopped = ControlDocument(version=1, tombstone="a rule said so")
    store.child(run_prefix("default", "r1")).put(CONTROL_DOCUMENT, stopped.encode())
    slurm.command("scontrol", "requeue", job.id)  # starts once the credential of its first start has expired
    status = bench.end_of(job)
    output = bench.output_of(job)
    assert (status.state, status.exit_code) == ("ended", EXIT_TOMBSTONE), output
    assert b"does not start again" in output
    assert bench.backend.reattach(job.id).identity["restarts"] == 1


def test_a_job_that_sbatch_started_is_attached_to_and_stopped(slurm: SlurmCluster, bench: Bench) -> None:
    ready = bench.folder / "ready"
    script = bench.folder / "job.sh"
    program = TELLING.replace("{ready!r}", repr(str(ready)))
    (bench.folder / "program.py").write_text(program)
    script.write_text(f"#!/bin/bash\nsrun {sys.executable} program.py\n")
    job_id = slurm.command("sbatch", "--parsable", f"--chdir={bench.folder}", str(script)).strip()
    job = bench.backend.reattach(job_id)
    eventually(ready.exists, SECONDS)
    assert job not in bench.backend.jobs()
    bench.backend.stop(job)
    assert bench.end_of(job).exit_code == 5
    assert b"asked to end" in bench.output_of(job)


def test_names_and_comments_may_hold_anything(slurm: SlurmCluster, bench: Bench, tmp_path: Path) -> None:
    """What a job is called is its user's, and passes for no field and no row of another job."""
    forged = "\x1fa\x1f\n7\x1fCOMPLETED\x1f1\x1f0\x1f0\x1f\x1e\u2028|"
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\nsleep 100\n")
    number = slurm.command(
        "sbatch",
        "--parsable",
        f"--comment={forged}",
        f"--job-name={forged}",
        "--output=/dev/null",
        str(script),
    ).strip()
    job = bench.backend.reattach(number)
    assert job.id == number
    assert bench.backend.status(job).state in ("queued", "running")
    assert bench.backend.jobs() == []
    bench.backend.kill(job)


def test_torchrun_spans_the_nodes(bench: Bench) -> None:
    pytest.importorskip("torch")
    two = Bench(Slurm(partition="all", nodes=2), bench.folder)
    told = bench.folder / "tells.py"
    told.write_text(
        "import os\nnames = 'RANK WORLD_SIZE LOCAL_RANK GROUP_RANK'.split()\n"
        "os.write(1, (' '.join(os.environ[name] for name in names) + '\\n').encode())\n"
    )
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(told))
    name = f"torchrun-{uuid.uuid4().hex[:8]}"
    job = two.backend.submit(Launch(command, {}, bench.folder, name=name))
    status = two.end_of(job)
    output = two.output_of(job).decode()
    assert status.exit_code == 0, output
    lines = {line for line in output.splitlines() if line.replace(" ", "").isdecimal()}
    assert lines == {"0 4 0 0", "1 4 1 0", "2 4 0 1", "3 4 1 1"}
