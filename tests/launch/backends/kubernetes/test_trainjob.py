"""Kubeflow's TrainJobs on the stand-in for a cluster: several workers, told apart from others' by the chain of owners."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.backends.kubernetes.double import Double, running_double
from tests.services.jobs import eventually
from watchstep_launch.backend import JobHandle, JobNotFoundError, JobStatus, Launch, SubmissionRejectedError
from watchstep_launch.backends.kubernetes.backend import Kubernetes

SECONDS = 60.0
WORKERS = 2
TOLD = "import os; print(os.environ['PET_NNODES'], os.environ['WATCHSTEP_RESTARTS'], os.environ['TOKEN'])"
WAITS = (
    "import os, pathlib, signal, sys\n"
    "pathlib.Path(sys.argv[1], str(os.getpid())).touch()\n"
    "while True: signal.pause()"
)


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    with running_double() as held:
        monkeypatch.setenv("KUBECONFIG", str(held.write_kubeconfig(tmp_path / "kubeconfig")))
        yield held


@pytest.fixture
def backend() -> Kubernetes:
    return Kubernetes(image="train:1", workers=WORKERS)


def launch(folder: Path, program: str, **secrets: str) -> Launch:
    ready = folder / "ready"
    ready.mkdir(exist_ok=True)
    name = f"t-{uuid.uuid4().hex[:8]}"
    return Launch(("python", "-c", program, str(ready)), {}, folder, name=name, secrets=secrets)


def running(backend: Kubernetes, folder: Path) -> JobHandle:
    before = len(list(folder.glob("ready/*")))
    job = backend.submit(launch(folder, WAITS))
    eventually(lambda: len(list(folder.glob("ready/*"))) == before + WORKERS, SECONDS)
    return job


def end_of(backend: Kubernetes, job: JobHandle) -> JobStatus:
    eventually(lambda: backend.status(job).is_over, SECONDS)
    return backend.status(job)


def test_each_worker_runs_the_command(double: Double, backend: Kubernetes, tmp_path: Path) -> None:
    job = backend.submit(launch(tmp_path, TOLD, TOKEN="s3cr3t"))
    assert end_of(backend, job).exit_code == 0
    assert backend.logs(job).data == b"2 0 s3cr3t\n" * WORKERS
    assert job.id.startswith("trainjob/")
    assert "s3cr3t" not in str(double.objects("TrainJob"))
    (secret,) = double.objects("Secret")
    assert secret["metadata"]["ownerReferences"][0]["kind"] == "TrainJob"


def test_a_worker_that_fails_fails_the_job(double: Double, backend: Kubernetes, tmp_path: Path) -> None:
    job = backend.submit(launch(tmp_path, "raise SystemExit(4)"))
    status = end_of(backend, job)
    assert (status.state, status.exit_code) == ("ended", 4)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_an_end_suspends_it_and_no_other(
    double: Double, backend: Kubernetes, tmp_path: Path, how: str
) -> None:
    other, job = running(backend, tmp_path), running(backend, tmp_path)
    assert backend.status(job).state == "running"
    assert {one.id for one in backend.jobs()} == {job.id, other.id}
    again = backend.reattach(job.id)
    assert (again, backend.settled(again)) == (job, job)
    getattr(backend, how)(again)
    assert end_of(backend, job) == JobStatus("cancelled", None, backend.status(job).detail)
    assert getattr(backend, how)(job).state == "cancelled"
    assert backend.jobs() == [other]
    assert backend.status(other).state == "running"
    assert len(double.objects("Pod")) == WORKERS


def test_what_goes_by_the_name_of_another_is_not_its_own(
    double: Double, backend: Kubernetes, tmp_path: Path
) -> None:
    """A JobSet that somebody else made under the TrainJob's name: none of its pods is looked at."""
    job = running(backend, tmp_path)
    with double.cluster.lock:
        (job_set,) = double.cluster.store.all("JobSet")
        job_set["metadata"]["ownerReferences"] = []
    assert backend.logs(job).data == b""
    assert backend.status(job).state == "queued"


def test_a_cluster_without_kubeflow_says_what_to_install(
    double: Double, backend: Kubernetes, tmp_path: Path
) -> None:
    double.installed = False
    with pytest.raises(SubmissionRejectedError, match="not installed") as caught:
        backend.submit(launch(tmp_path, TOLD))
    assert "Kubeflow Trainer" in caught.value.hint
    with pytest.raises(JobNotFoundError):
        backend.reattach("trainjob/anything")
    assert backend.jobs() == []
    one = Kubernetes(image="train:1")
    assert end_of(one, one.submit(launch(tmp_path, "pass"))).exit_code == 0
