"""Kubernetes, on a double of its API whose pods are processes of this machine."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import STUBBORN, TELLING, WILLING, Bench
from tests.launch.backends.kubernetes.double import Double, running_double
from tests.services.jobs import eventually
from tests.services.redis import free_port
from watchstep.errors import ConfigError
from watchstep_launch.backend import (
    BackendDownError,
    CredentialsExpiredError,
    JobHandle,
    JobNotFoundError,
    JobStatus,
    Launch,
    SubmissionRejectedError,
)
from watchstep_launch.backends.kubernetes import states
from watchstep_launch.backends.kubernetes.backend import Kubernetes
from watchstep_launch.backends.kubernetes.submission import pods_of

SECONDS = 60.0
SECRETS = {"WATCHSTEP_TOKEN": "s3cr3t"}
JOB = JobHandle("kubernetes", "a-job", {"uid": "u", "created": "2026-01-01T00:00:00Z", "cluster": ""})


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    with running_double() as held:
        monkeypatch.setenv("KUBECONFIG", str(held.write_kubeconfig(tmp_path / "kubeconfig")))
        yield held


@pytest.fixture
def submit(double: Double, tmp_path: Path) -> Callable[..., tuple[Kubernetes, JobHandle]]:
    """Start a Python program; wait until it is ready, where it says so."""

    def submitted(
        program: str, secrets: dict[str, str] | None = None, **settings: Any
    ) -> tuple[Kubernetes, JobHandle]:
        backend = Kubernetes(image="train:1", **settings)
        job = backend.submit(launch(program, tmp_path, secrets))
        if "{ready!r}" in program:
            eventually((tmp_path / "ready").exists, SECONDS)
        return backend, job

    return submitted


def launch(program: str, folder: Path, secrets: dict[str, str] | None = None, name: str = "") -> Launch:
    command = ("python", "-c", program.replace("{ready!r}", repr(str(folder / "ready"))))
    return Launch(command, {}, folder, name=name or f"t-{uuid.uuid4().hex[:8]}", secrets=secrets or {})


def end_of(backend: Kubernetes, job: JobHandle) -> JobStatus:
    eventually(lambda: backend.status(job).is_over, SECONDS)
    return backend.status(job)


def output_of(backend: Kubernetes, job: JobHandle) -> bytes:
    return backend.logs(job).data


def nothing_is_left(double: Double) -> bool:
    return not any(double.objects(kind) for kind in ("Job", "Pod", "Secret", "TrainJob"))


Submit = Callable[..., tuple[Kubernetes, JobHandle]]


def test_the_secret_is_the_jobs_and_goes_with_it(double: Double, submit: Submit) -> None:
    backend, job = submit("import os; print(os.environ['WATCHSTEP_TOKEN'])", SECRETS)
    assert (end_of(backend, job).exit_code, output_of(backend, job)) == (0, b"s3cr3t\n")
    (secret,) = double.objects("Secret")
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job.identity["uid"]
    assert "s3cr3t" not in str([double.objects("Job"), double.objects("Pod")])
    with double.cluster.lock:
        store = double.cluster.store
        double.cluster.delete(store.get("Job", "default", job.id))
    assert nothing_is_left(double)
    assert backend.status(job).state == "vanished"
    assert backend.stop(job).state == "vanished"
    assert output_of(backend, job) == b""


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda double: setattr(double, "quota", "exceeded quota: gpus, requested: 8"), "exceeded quota"),
        (lambda double: double.fault("POST /apis/batch", 422), "answered 422"),
        (lambda double: double.fault("POST /api/v1/namespaces/default/secrets", 422), "answered 422"),
    ],
)
def test_what_is_refused_leaves_nothing(
    double: Double, tmp_path: Path, spoil: Callable[[Double], None], what: str
) -> None:
    spoil(double)
    with pytest.raises(SubmissionRejectedError, match=what):
        Kubernetes(image="train:1").submit(launch(WILLING, tmp_path, SECRETS))
    assert nothing_is_left(double)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"namespace": "nowhere"}, '"nowhere" not found'),
        ({"image": None}, "image is not set"),
        ({"pod_spec": {"tolerance": []}}, "tolerance"),
        ({"container": {"volumeMounts": [{"name": "data"}]}}, "mountPath"),
    ],
)
def test_settings_that_the_cluster_refuses(
    double: Double, tmp_path: Path, settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(SubmissionRejectedError, match=what):
        Kubernetes.model_validate({"image": "train:1", **settings}).submit(launch("", tmp_path))
    assert nothing_is_left(double)


@pytest.mark.ci
def test_rights_that_are_missing_are_told_and_nothing_is_left(double: Double, tmp_path: Path) -> None:
    double.forbidden = {("create", "secrets")}
    with pytest.raises(CredentialsExpiredError, match='cannot create resource "secrets"'):
        Kubernetes(image="train:1").submit(launch(WILLING, tmp_path, SECRETS))
    assert nothing_is_left(double)


@pytest.mark.parametrize("place", ["POST /apis/batch", "POST /api/v1/namespaces/default/secrets"])
def test_a_submission_without_answer_is_found_by_its_name(double: Double, tmp_path: Path, place: str) -> None:
    double.fault(place, "unanswered")
    backend = Kubernetes(image="train:1")
    job = backend.submit(launch("print('once')", tmp_path, SECRETS))
    assert end_of(backend, job).exit_code == 0
    assert output_of(backend, job) == b"once\n"
    assert len(double.objects("Job")) == 1


def test_a_submission_that_was_not_taken_is_told_by_its_name(double: Double, tmp_path: Path) -> None:
    double.fault("POST /apis/batch", "silent")
    with pytest.raises(BackendDownError, match="unknown whether Job 'a-launch' was accepted"):
        Kubernetes(image="train:1").submit(launch("", tmp_path, name="a-launch"))
    assert nothing_is_left(double)


def test_another_job_with_the_name_is_not_taken_for_this_one(double: Double, tmp_path: Path) -> None:
    backend = Kubernetes(image="train:1")
    first = backend.submit(launch(WILLING, tmp_path, name="a-name"))
    with pytest.raises(SubmissionRejectedError, match="already exists"):
        backend.submit(launch("", tmp_path, SECRETS, name="a-name"))
    double.fault("POST /apis/batch", "silent")
    with pytest.raises(BackendDownError):
        backend.submit(launch("", tmp_path, SECRETS, name="a-name"))
    assert (len(double.objects("Job")), double.objects("Secret")) == (1, [])
    assert not backend.status(first).is_over


RETRIED = "import os, sys; print(os.environ['WATCHSTEP_RESTARTS'], flush=True); sys.exit({code})"


def test_each_start_is_told_how_often_it_was_started_before(submit: Submit) -> None:
    program = RETRIED.format(code="os.environ['WATCHSTEP_RESTARTS'] != '2'")
    backend, job = submit(program, restarts=3)
    assert end_of(backend, job).exit_code == 0
    assert output_of(backend, job) == b"0\n1\n2\n"


@pytest.mark.parametrize(("code", "starts"), [(86, 1), (87, 1), (3, 2)])
def test_what_was_stopped_is_not_started_again(submit: Submit, code: int, starts: int) -> None:
    backend, job = submit(RETRIED.format(code=code), restarts=1)
    status = end_of(backend, job)
    assert (status.state, status.exit_code) == ("ended", code)
    assert len(output_of(backend, job).splitlines()) == starts


def test_a_stop_ends_all_starts_and_leaves_code_and_output(double: Double, submit: Submit) -> None:
    backend, job = submit(TELLING, restarts=9)
    backend.stop(job)
    assert backend.stop(job).state in ("running", "cancelled")  # asked twice
    status = end_of(backend, job)
    assert (status.state, status.exit_code) == ("cancelled", 5)
    assert output_of(backend, job) == b"asked to end\n"
    assert len(double.objects("Pod")) == 1


def test_a_stop_between_two_starts(double: Double, submit: Submit) -> None:
    double.cluster.backoff_seconds = 3600.0
    backend, job = submit("raise SystemExit(3)", restarts=9)
    eventually(lambda: "waiting for a restart" in backend.status(job).detail, SECONDS)
    assert backend.status(job).state == "running"
    backend.stop(job)
    assert (end_of(backend, job).state, len(double.objects("Pod"))) == ("cancelled", 1)


def test_a_killed_job_says_so(double: Double, submit: Submit) -> None:
    backend, job = submit(STUBBORN, restarts=9)
    backend.kill(job)
    assert end_of(backend, job) == JobStatus("cancelled", None, backend.status(job).detail)
    assert "DeadlineExceeded" in backend.status(job).detail
    assert (len(double.objects("Job")), double.objects("Pod")) == (1, [])
    assert backend.jobs() == []


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda kubelet: setattr(kubelet, "images", {"another:1"}), "ImagePullBackOff: Back-off pulling"),
        (lambda kubelet: setattr(kubelet, "full", True), "Unschedulable: 0/1 nodes are available"),
    ],
)
def test_a_pod_that_cannot_start_says_why_and_can_be_stopped(
    double: Double, submit: Submit, spoil: Callable[[Any], None], told: str
) -> None:
    spoil(double.cluster.kubelet)
    backend, job = submit("print('never')")
    eventually(lambda: backend.status(job).detail != "no pod exists yet", SECONDS)
    status = backend.status(job)
    assert (status.state, status.detail[: len(told)]) == ("queued", told)
    assert output_of(backend, job) == b""
    backend.stop(job)
    assert end_of(backend, job).state == "cancelled"


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_job_that_a_queue_suspended_is_taken_back(double: Double, submit: Submit, how: str) -> None:
    double.cluster.stalled = True  # no pod is made before it is suspended
    backend, job = submit("print('never')", SECRETS)
    with double.cluster.lock:
        double.cluster.store.patch("Job", "default", job.id, {"spec": {"suspend": True}})
        double.cluster.stalled = False
        double.cluster.see(double.cluster.store.get("Job", "default", job.id))
    assert backend.status(job) == JobStatus("queued", None, "suspended: waiting for admission")
    assert job in backend.jobs()
    assert getattr(backend, how)(job).state == "vanished"
    assert nothing_is_left(double)


@pytest.mark.parametrize("how", [states.stop, states.kill])
def test_a_later_job_with_the_name_is_left_alone_even_between_look_and_stop(
    double: Double, submit: Submit, tmp_path: Path, how: Callable[..., None]
) -> None:
    backend, job = submit(WILLING)
    client = backend._client()
    found = client.read(f"/apis/batch/v1/namespaces/default/jobs/{job.id}")
    pods = pods_of(client, "Job", found)
    with double.cluster.lock:
        double.cluster.delete(double.cluster.store.get("Job", "default", job.id))
    eventually(lambda: nothing_is_left(double), SECONDS)
    (tmp_path / "ready").unlink()
    later = backend.submit(launch(WILLING, tmp_path, name=job.id))
    eventually((tmp_path / "ready").exists, SECONDS)
    before = double.objects("Job"), double.objects("Pod")
    how(client, "Job", found, pods)
    assert (double.objects("Job"), double.objects("Pod")) == before
    assert backend.status(job).state == "vanished"
    assert (later.id, backend.status(later).state) == (job.id, "running")
    assert later.identity["uid"] != job.identity["uid"]


def test_a_job_of_another_cluster_is_not_concluded_of(double: Double, submit: Submit) -> None:
    backend, job = submit(WILLING)
    elsewhere = replace(job, identity={**job.identity, "cluster": str(uuid.uuid4())})
    asked = len(double.asked)
    for call in (backend.status, backend.stop, backend.kill):
        assert call(elsewhere).state == "unknown"
    assert {one.split()[0] for one in double.asked[asked:]} <= {"GET"}
    assert backend.logs(elsewhere).data == b""
    assert backend.status(job).state == "running"


def test_without_the_right_to_see_the_cluster_the_uid_alone_tells(double: Double, submit: Submit) -> None:
    double.forbidden = {("get", "namespaces")}
    backend, job = submit(WILLING)
    assert job.identity["cluster"] == ""
    assert backend.settled(job) == job
    double.forbidden = set()
    seeing = Kubernetes(image="train:1")
    assert seeing.status(job).state == "running"
    assert backend.status(seeing.reattach(job.id)).state == "running"
    seeing.kill(job)


def test_a_cluster_that_is_away_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = Double(url=f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("KUBECONFIG", str(nobody.write_kubeconfig(tmp_path / "kubeconfig")))
    _told_by_all_calls(Kubernetes(image="i"), BackendDownError, "does not answer", tmp_path)


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_server_that_cannot_now(double: Double, tmp_path: Path, code: int) -> None:
    double.fault("", code, 100)
    _told_by_all_calls(Kubernetes(image="i"), BackendDownError, f"answered {code}", tmp_path)


def test_credentials_that_expire_are_taken_up_once_renewed(
    double: Double, submit: Submit, tmp_path: Path
) -> None:
    backend, job = submit(WILLING)
    double.token = "renewed"
    for _ in range(2):
        _told_by_all_calls(backend, CredentialsExpiredError, "Unauthorized", tmp_path, job)
    double.write_kubeconfig(tmp_path / "kubeconfig")
    assert backend.status(job).state == "running"
    backend.kill(job)


def test_a_right_that_is_missing_is_named(double: Double, submit: Submit) -> None:
    backend, job = submit(WILLING)
    double.forbidden = {("patch", "pods")}
    with pytest.raises(CredentialsExpiredError, match='cannot patch resource "pods"'):
        backend.stop(job)
    assert not backend.status(job).is_over
    double.forbidden = set()
    backend.kill(job)


def _told_by_all_calls(
    backend: Kubernetes, error: type[Exception], what: str, folder: Path, job: JobHandle = JOB
) -> None:
    for call in (backend.status, backend.stop, backend.kill, backend.logs):
        with pytest.raises(error, match=what):
            call(job)
    with pytest.raises(error, match=what):
        backend.submit(launch("", folder))
    with pytest.raises(error, match=what):
        backend.jobs()
    with pytest.raises(error, match=what):
        backend.reattach("a-job")


def test_an_answer_of_somebody_else_is_no_state(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Double, "answer", lambda *_: (200, b"<html>a proxy's page</html>"))
    with pytest.raises(BackendDownError, match="a proxy's page"):
        Kubernetes().status(JOB)


def test_no_cluster_or_context_is_told(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendDownError, match=r"no cluster is configured .*nowhere"):
        Kubernetes(context="nowhere").status(JOB)
    assert Kubernetes(context="double").status(JOB).state == "vanished"
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(BackendDownError, match="no cluster is configured"):
        Kubernetes().status(JOB)


def test_a_program_that_another_tool_started_is_taken_up(double: Double) -> None:
    """A Job as people write them: not indexed, no policy, its container called otherwise."""
    program = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); signal.pause()"
    container = {"name": "theirs", "image": "x", "command": ["python", "-c", program]}
    body = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "theirs"},
        "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [container]}}},
    }
    with double.cluster.lock:
        double.cluster.see(double.cluster.store.create("Job", "default", body))
    backend = Kubernetes()
    job = backend.reattach("theirs")
    assert job not in backend.jobs()
    eventually(lambda: output_of(backend, job) == b"up\n", SECONDS)
    backend.stop(job)
    assert end_of(backend, job).exit_code == 7


@pytest.mark.parametrize("id", ["", "A", "a b", "-a", "a/b", "trainjob/", "../secrets/a", "a?x", "a%2f"])
def test_ids_that_are_none(double: Double, id: str) -> None:  # noqa: A002 - the protocol's
    with pytest.raises(JobNotFoundError):
        Kubernetes().reattach(id)
    with pytest.raises(ConfigError):
        Kubernetes().settled(replace(JOB, id=id))
    assert Kubernetes().status(replace(JOB, id=id)).state == "vanished"
    assert double.asked == []


@pytest.mark.parametrize(
    "identity",
    [
        {**JOB.identity, "uid": "a b"},
        {**JOB.identity, "created": "yesterday"},
        {**JOB.identity, "cluster": "a/b"},
        {"uid": "u", "cluster": ""},
    ],
)
def test_identities_that_are_none(identity: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="Kubernetes identity"):
        Kubernetes().settled(replace(JOB, identity=identity))


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[Double]:
    with running_double() as double:
        yield double


@pytest.fixture
def bench(kubernetes: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.write_kubeconfig(tmp_path / "kubeconfig")))
    backend = Kubernetes(image="training:1", working_directory=str(tmp_path))

    def deleted_and_made_anew(identity: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**identity, "uid": "3b9e9e4e-0000-4000-8000-000000000000"}

    held = Bench(backend, tmp_path, earlier=deleted_and_made_anew)
    yield held
    held.close()
