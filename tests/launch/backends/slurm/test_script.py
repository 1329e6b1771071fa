"""The script of a Slurm job, and whose jobs are seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launch.backends.slurm.slurm_cluster import SECONDS, SlurmCluster
from tests.services.jobs import eventually
from watchstep import Hook
from watchstep.errors import ConfigError
from watchstep_launch.backend import JobNotFoundError, JobStatus, Launch
from watchstep_launch.backends.slurm.backend import Slurm, batch_script
from watchstep_launch.backends.slurm.commands import JobRow, is_job_id, last_rows, parse_accounting
from watchstep_launch.backends.slurm.identity import SlurmIdentity, permits_stopping_others

TELLS = "import json, os, sys; print(json.dumps([sys.argv[1:], {n: v for n, v in os.environ.items() if n.startswith('GIVEN_')}]))"
SRUN = """\
#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
"""Takes the place of srun where no cluster is needed: leaves out its options, and becomes the task."""
SAYS = """\
#!{python}
import sys
(end,) = [text[12:] for text in sys.argv if text.startswith("--delimiter=")] or [""]
for row in {rows}:
    print(*row, "", sep=end)
"""
"""Takes the place of squeue and sacct: writes rows as sacct does."""
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)
names = st.from_regex(r"\AGIVEN_[A-Z0-9_]{0,8}\Z")
NOBODY = 65534
ATTACHES = """
import os, sys
import watchstep_services.cli.jobs as launching
import watchstep.platform.process, watchstep_launch.backends.slurm.backend, watchstep_launch.attach
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
launching.app(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bin")
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.ci
@settings(max_examples=40)
@given(
    arguments=st.lists(texts, max_size=5),
    given_=st.dictionaries(names, texts, max_size=3),
    tasks=st.sampled_from([1, 2]),
)
def test_arguments_and_values_reach_the_program_as_they_are(
    path: str, arguments: list[str], given_: dict[str, str], tasks: int
) -> None:
    launch = Launch((sys.executable, "-c", TELLS, *arguments), given_, Path("/"))
    done = subprocess.run(
        ["bash", "-c", batch_script(launch, tasks, 1)],
        env={
            "PATH": path,
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": "0",
        },
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout) == [arguments, given_]


def test_what_no_program_can_be_given_is_told() -> None:
    with pytest.raises(ConfigError, match="zero byte"):
        batch_script(Launch(("true", "a\0b"), {}, Path("/")), 1, 1)
    with pytest.raises(ConfigError, match="'a b'"):
        batch_script(Launch(("true",), {"a b": "1"}, Path("/")), 1, 1)


@pytest.mark.parametrize(
    ("state", "wait_status", "status"),
    [
        ("PENDING", 0, JobStatus("queued")),
        ("REQUEUE_HOLD", 0, JobStatus("queued")),
        ("RUNNING", 0, JobStatus("running")),
        ("COMPLETING", 0, JobStatus("running")),
        ("COMPLETED", 0, JobStatus("ended", 0)),
        ("FAILED", 86 << 8, JobStatus("ended", 86)),
        ("FAILED", (128 + 9) << 8, JobStatus("ended", -9)),
        ("FAILED", 15, JobStatus("ended", -15)),
        ("TIMEOUT", 0, JobStatus("ended", None)),
        ("NODE_FAIL", 0, JobStatus("ended", None)),
        ("CANCELLED", 0, JobStatus("cancelled", None)),
        ("PREEMPTED", 0, JobStatus("cancelled", None)),
        ("SOMETHING_NEW", 0, JobStatus("running")),
    ],
)
def test_slurms_words_for_how_a_job_is(state: str, wait_status: int, status: JobStatus) -> None:
    held = JobRow("7", state, 1000, 0, wait_status).status
    assert (held.state, held.exit_code) == (status.state, status.exit_code)


def test_accounting_finds_the_last_start_of_a_job_and_no_other_with_its_id() -> None:
    """As ``sacct --parsable --duplicates`` of Slurm 22.05 writes it, with times in seconds."""
    said = (
        "7<>COMPLETED<>0:0<>500<>c<>train<>\n"
        "7<>NODE_FAIL<>0:0<>1000<>c<>train<>\n"
        "7<>CANCELLED by 1000<>0:15<>1200<>c<>train<>\n"
        "7<>FAILED<>3:0<>1300<>c<>a | b\x1f\n8\x1e\u2028c<>\n"
    )
    rows = parse_accounting(said, "<>")
    assert [row.name for row in rows] == ["train", "train", "train", "a | b\x1f\n8\x1e\u2028c"]
    found = SlurmIdentity("c", "train", 1000, 0).last_start(rows)
    assert found is not None
    assert found.status == JobStatus("cancelled", -15, "CANCELLED")
    assert SlurmIdentity("c", "train", 1001, 0).last_start(rows) is None
    assert SlurmIdentity("d", "train", 1000, 0).last_start(rows) is None


def test_a_requeue_is_the_same_job_and_a_later_job_with_the_id_is_not() -> None:
    job = SlurmIdentity("c", "train", 1000, 1)
    assert job.means(JobRow("7", "RUNNING", 1000, 1, 0, cluster="c", name="renamed"))
    assert job.means(JobRow("7", "PENDING", 1200, 2, 0, cluster="c", name="train"))
    assert not job.means(JobRow("7", "PENDING", 1200, 2, 0, cluster="c", name="another"))
    assert not job.means(JobRow("7", "RUNNING", 1200, 0, 0, cluster="c", name="train"))
    assert not job.means(JobRow("7", "RUNNING", 900, 2, 0, cluster="c", name="train"))
    assert not job.means(JobRow("7", "RUNNING", 1000, 1, 0, cluster="d", name="train"))


def test_ids() -> None:
    assert all(map(is_job_id, ("1", "123456", "12_3")))
    assert not any(map(is_job_id, ("", "0", "-1", "1;id", "1_", "1,2", "x", "1\n", "٣")))


def test_a_job_that_the_controller_forgot_is_known_from_accounting_as_it_was_started_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that say what Slurm's do where accounting is kept; the clusters of the other tests keep none."""

    def says(name: str, *rows: tuple[str, ...]) -> None:
        (tmp_path / name).write_text(f"{SAYS.format(python=sys.executable, rows=rows)}")
        (tmp_path / name).chmod(0o755)

    says("squeue")
    says(
        "sacct",
        ("41", "REQUEUED", "0:0", "100", "c", "night"),
        ("41", "COMPLETED", "0:0", "200", "c", "night"),
    )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert [(row.id, row.state, row.submitted) for row in last_rows("--jobs=41")] == [
        ("41", "COMPLETED", 200)
    ]
    found = Slurm().reattach("41")
    assert (found.id, found.identity["submitted"], found.identity["restarts"]) == ("41", 200, 1)
    assert Slurm().find("night") == found
    says("sacct", ("41", "RUNNING", "0:0", "100", "c", "n"), ("42", "RUNNING", "0:0", "100", "c", "n"))
    with pytest.raises(JobNotFoundError, match="is an array"):
        Slurm().reattach("41")


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
