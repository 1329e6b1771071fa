"""Jobs of other users of a Slurm cluster: none is taken up by who may not stop it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.backends.slurm.slurm_cluster import SECONDS, SlurmCluster
from tests.services.jobs import eventually
from watchstep import Hook
from watchstep_launch import Slurm
from watchstep_launch.backends.slurm.identity import permits_stopping_others

NOBODY = 65534

ATTACHES = """
import os, sys
import watchstep_services.cli.jobs as launching
import watchstep.platform.process, watchstep_launch.backends.slurm.backend, watchstep_launch.attach
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
launching.app(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("said", "over"),
    [
        ("", False),
        ("None|\n", False),
        ("Operator|\n", True),
        ("Administrator|other\n", True),
        ("None|other,vision\n", True),
        ("None|other,visionary\n", False),
    ],
)
def test_who_may_stop_the_jobs_of_others_is_read_from_accounting(said: str, over: bool) -> None:
    assert permits_stopping_others(said, "vision") is over
    assert permits_stopping_others(said, "") is (over and "None" not in said)


@pytest.fixture
def open_place(slurm: SlurmCluster) -> Iterator[Path]:
    """A folder that other users see, on a cluster that they reach."""
    if os.geteuid() != 0:
        pytest.skip("NO OTHER USER HERE: only root can submit jobs as somebody else")
    for place in (slurm.folder, slurm.folder / "munge"):
        place.chmod(0o711)
    with tempfile.TemporaryDirectory(prefix="ws-owner-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def submitted(place: Path, user: int) -> str:
    done = subprocess.run(
        ["sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 1000"],
        cwd=place, user=user, group=user, capture_output=True, text=True, check=True, timeout=SECONDS,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.ci
def test_a_job_of_another_user_is_refused_and_left_alone(slurm: SlurmCluster, open_place: Path) -> None:
    theirs, ours = submitted(open_place, 0), submitted(open_place, NOBODY)
    words = [
        sys.executable,
        "-c",
        ATTACHES,
        str(NOBODY),
        "attach",
        "--run",
        f"{open_place}/store/default/night",
    ]
    environment = {**os.environ, "WATCHSTEP_JOBS": str(open_place / "jobs"), "HOME": str(open_place)}
    with Hook(open_place / "store", project="default", run="night") as hook:
        hook.log(loss=1.0)
        hook.step()
        eventually((open_place / "store" / "default" / "night" / "run.json").exists)
        try:
            done = subprocess.run(
                [*words, "--job", f"slurm:{theirs}"], env=environment, cwd=open_place, check=False,
                capture_output=True, text=True, timeout=SECONDS,
            )  # fmt: skip
            backend = Slurm()
            for job in (theirs, ours):
                handle = backend.reattach(job)
                assert not backend.status(handle).is_over
                backend.check_may_stop(handle)  # who is root, or Slurm's user, may stop any
        finally:
            slurm.command("scancel", theirs, ours)
    assert done.returncode != 0
    told = f"{done.stderr}{done.stdout}"
    assert f"job slurm:{theirs} belongs to user root; user nobody may not stop it" in told
    assert "attach as the job's user" in told
    assert not (open_place / "jobs").exists()  # nothing was written down
    assert not (open_place / "store" / ".watchstep").exists()  # nor a service started
