"""Manifests of jobs and of train jobs."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubeflow_trainer_api import models
from pydantic import ValidationError

from tests.launch.backends.kubernetes.double import Double, running_double
from tests.launch.backends.kubernetes.double_kubelet import expanded
from tests.services.jobs import eventually
from watchstep.errors import ConfigError
from watchstep_launch.backend import JobHandle, JobNotFoundError, JobStatus, Launch, SubmissionRejectedError
from watchstep_launch.backends.kubernetes.backend import Kubernetes
from watchstep_launch.backends.kubernetes.submission import manifest, name_of, secret

LAUNCH = Launch(
    ("python", "train.py", "$(HOME)"),
    {"SEED": "$7", "WATCHSTEP_TOKEN": "an older one"},
    Path("/somewhere"),
    name="ws-a-run-0123abcd",
    secrets={"WATCHSTEP_TOKEN": "s3cr3t"},
)
FULL = Kubernetes(
    namespace="ml",
    image="registry/train:1",
    gpus=8,
    cpus="4",
    memory="64Gi",
    restarts=3,
    grace_seconds=300,
    working_directory="/workspace",
    service_account="trainer",
    node_selector={"gpu": "h200"},
    labels={"kueue.x-k8s.io/queue-name": "gpu"},
    pod_spec={"tolerations": [{"operator": "Exists"}], "volumes": [{"name": "data", "emptyDir": {}}]},
    container={"volumeMounts": [{"name": "data", "mountPath": "/data"}]},
)
SECONDS = 60.0
WORKERS = 2
TOLD = "import os; print(os.environ['PET_NNODES'], os.environ['WATCHSTEP_RESTARTS'], os.environ['TOKEN'])"
WAITS = (
    "import os, pathlib, signal, sys\n"
    "pathlib.Path(sys.argv[1], str(os.getpid())).touch()\n"
    "while True: signal.pause()"
)


@pytest.mark.parametrize("version", ["1.29", "1.30", "1.31", "1.33", "1.35", "1.37"])
@pytest.mark.parametrize("backend", [Kubernetes(image="train"), FULL])
def test_a_job_fits_the_published_schema(version: str, backend: Kubernetes) -> None:
    job = manifest(LAUNCH, backend)
    kubernetes_validate.validate(job, version, strict=True)
    job["metadata"]["uid"] = "1"
    kubernetes_validate.validate(secret(LAUNCH, job), version, strict=True)


def test_a_train_job_fits_kubeflows_models() -> None:
    train = manifest(LAUNCH, Kubernetes(image="train:1", workers=4, gpus=8, memory="1Ti", cpus="64"))
    read = models.TrainerV1alpha1TrainJob.from_dict(train)
    assert read is not None
    assert read.to_dict() == train
    assert (train["kind"], train["spec"]["trainer"]["numNodes"]) == ("TrainJob", 4)
    assert manifest(LAUNCH, Kubernetes(resource="TrainJob"))["kind"] == "TrainJob"


@pytest.mark.parametrize("backend", [FULL, Kubernetes(workers=2)])
def test_secrets_are_in_the_secret_and_nowhere_else(backend: Kubernetes) -> None:
    asked = manifest(LAUNCH, backend)
    assert "s3cr3t" not in json.dumps(asked)
    assert json.dumps(asked).count('"WATCHSTEP_TOKEN", "value') == 1  # the reference alone
    made = {**asked, "metadata": {**asked["metadata"], "uid": "a-uid"}}
    held = secret(LAUNCH, made)
    assert held["stringData"] == {"WATCHSTEP_TOKEN": "s3cr3t"}
    (owner,) = held["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == (asked["kind"], "a-uid")


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from("$()AB")))
def test_words_reach_the_program_as_they_are(text: str) -> None:
    asked = manifest(Launch(("p", text), {"V": text}, Path(), name="a"), Kubernetes(image="i"))
    container = asked["spec"]["template"]["spec"]["containers"][0]
    variables = {"A": "expanded", "AB": "expanded"}
    assert expanded(container["command"][1], variables) == text
    assert expanded(container["env"][0]["value"], variables) == text


@given(st.text("abcdefghij-0123456789", max_size=63), st.text("abcdefghij-0123456789", max_size=63))
def test_names_fit_and_no_two_launches_share_one(one: str, other: str) -> None:
    one, other = f"1{one[:61]}2".replace("--", "-0"), f"1{other[:61]}2".replace("--", "-0")
    name = name_of(one)
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name)
    assert name_of(one) == name
    assert (name_of(other) == name) is (one == other)


def test_launches_without_a_name_get_one_that_their_secret_shares() -> None:
    asked = manifest(Launch(("p",), {}, Path(), secrets={"T": "x"}), Kubernetes(image="i"))
    reference = asked["spec"]["template"]["spec"]["containers"][0]["env"][0]["valueFrom"]["secretKeyRef"]
    assert reference["name"] == asked["metadata"]["name"] != name_of("")


@pytest.mark.parametrize(
    ("launch", "what"),
    [
        (Launch(("p", "a\0b"), {}, Path()), "zero byte"),
        (Launch(("p", "\udcff"), {}, Path()), "not valid Unicode"),
        (Launch(("p",), {"a b": "1"}, Path()), "'a b'"),
        (Launch(("p",), {}, Path(), secrets={"": "1"}), "variable ''"),
    ],
)
def test_what_no_container_can_be_given_is_named(launch: Launch, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        manifest(launch, Kubernetes(image="i"))


def test_a_secret_that_cannot_be_given_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        manifest(Launch(("p",), {}, Path(), secrets={"T": "s3cr3t\0"}), Kubernetes(image="i"))
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"workers": 2, "resource": "Job"}, "one worker"),
        ({"workers": 2, "restarts": 1}, "restarts applies to a Job only"),
        ({"workers": 2, "node_selector": {"a": "b"}}, "node_selector applies to a Job only"),
        ({"namespace": "No_Name"}, "namespace"),
        ({"memory": "much"}, "memory"),
        ({"image": "a b"}, "image"),
        ({"partition": "gpu"}, "partition"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        Kubernetes.model_validate(settings)


def test_a_job_needs_an_image_and_a_train_job_has_its_runtimes() -> None:
    with pytest.raises(ConfigError, match="image is not set"):
        manifest(LAUNCH, Kubernetes())
    assert "image" not in manifest(LAUNCH, Kubernetes(workers=2))["spec"]["trainer"]


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
