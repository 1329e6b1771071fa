"""The estimator, and its import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from tests.services.jobs import eventually
from watchstep.errors import ConfigError, NotFoundError, ServiceError, WatchstepError
from watchstep.stopping import EXIT_STOPPED, EXIT_TOMBSTONE
from watchstep_launch import Estimator, Job, JobStatus, Local
from watchstep_launch.backend import SubmissionRejectedError
from watchstep_launch.job_record import JobRecord
from watchstep_rules import non_finite_values, vanishing_gradient
from watchstep_rules.config.by_name import sagemaker_saturated_activation

SECONDS = 180.0
TRAIN = """
import sys, time
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
bad, last = int(sys.argv[1]), int(sys.argv[2])
for step in range(last):
    batch = torch.randn(8, 4)
    if step == bad:
        batch[0, 0] = float("nan")
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
print("trained to the end")
"""
HEALTHY = """
import watchstep
with watchstep.Hook() as hook:
    for step in range(30):
        hook.log(loss=1 / (1 + step))
        hook.step()
print("trained to the end")
"""
TELLS = """
import json, os, signal, sys
os.write(1, json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("GIVEN"), os.environ.get("WATCHSTEP_LAUNCHED")]).encode())
os.write(1, b"\\n\\xff\\x00 bytes as they are \\r\\n")
os.write(2, b"and errors\\n")
sys.exit(int(sys.argv[1]))
"""
WAITS = """
import os, pathlib, signal, sys
def end(*_):
    os.write(1, b"asked to end\\n")
    os._exit(5)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1]).touch()
while True:
    signal.pause()
"""
SERVER = (
    "alembic", "cryptography", "fastapi", "httpcore", "httpx", "limits", "prometheus_client", "psutil",
    "pydantic_settings", "sqlalchemy", "typer", "uvicorn", "celery", "psycopg", "redis", "starlette",
)  # fmt: skip
OF_BACKENDS = ("boto3", "kubernetes", "ray", "torch")
_BLOCKED = """
import importlib, pkgutil, sys
for name in {blocked!r}:
    sys.modules[name] = None
import watchstep_launch as estimator
for module in pkgutil.walk_packages(estimator.__path__, estimator.__name__ + "."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:  # the part of a backend that is imported when it is first used
        if (error.name or "").partition(".")[0] not in {of_backends!r}:
            raise
for name in estimator.__all__:
    getattr(estimator, name)
del sys.modules["typer"]  # with the launching side's commands
importlib.import_module("watchstep_services.cli.jobs")
"""


@pytest.fixture(scope="module")
def folder(beside: Path) -> Path:
    """Programs, and a store beside which one service is started by the first launch."""
    programs = {"train.py": TRAIN, "healthy.py": HEALTHY, "tells.py": TELLS, "waits.py": WAITS}
    for name, text in programs.items():
        (beside / name).write_text(text)
    return beside


@pytest.fixture
def estimate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Estimator:
    for name in ("WATCHSTEP_SERVICE", "WATCHSTEP_TOKEN", "WATCHSTEP_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WATCHSTEP_IDLE_SECONDS", "300")
    return Estimator("tells.py", backend=Local(), store=folder / "store", folder=folder)


def changed(estimator: Estimator, **changes: object) -> Estimator:
    return Estimator(**{**vars(estimator), **changes})


def written(job: Job) -> bytes:
    return b"".join(job.logs())


@pytest.mark.ci
def test_a_fault_is_stopped_by_its_rule_and_the_events_name_it(estimate: Estimator) -> None:
    rules = [non_finite_values().stop(), vanishing_gradient(threshold=1e-7).notify("ml-oncall")]
    job = changed(estimate, program="train.py", arguments=("12", "100000"), rules=rules).fit(wait=False)
    events = {event.type.removeprefix("io.watchstep."): event.data for event in job.events()}
    assert list(events) == ["run.started", "alert.firing", "stop.requested", "stop.done", "run.ended"]
    assert events["alert.firing"]["step"] == 12
    assert events["alert.firing"]["finding"]["tensor"]
    assert (events["stop.done"]["how"], events["run.ended"]["state"]) == ("cooperative", "stopped")
    assert job.wait(SECONDS) == JobStatus("ended", EXIT_STOPPED)
    assert b"trained to the end" not in written(job)
    assert job.run().tensor("0.weight:gradient").statistics() is not None
    again = Job.reattach(job.id)
    assert (again.status(), again.run_state().info.state) == (job.status(), "stopped")
    once_more = changed(estimate, program="healthy.py").fit(run=job.id)
    assert once_more.status() == JobStatus("ended", EXIT_TOMBSTONE)  # what was stopped stays stopped


@pytest.mark.release
def test_a_launched_program_measures_what_its_rules_need(estimate: Estimator) -> None:
    rules = [sagemaker_saturated_activation(threshold_tanh_min=7.0, threshold_tanh_max=8.0).stop()]
    job = changed(estimate, program="train.py", arguments=("-1", "100000"), rules=rules).fit(wait=False)
    assert job.wait(SECONDS) == JobStatus("ended", EXIT_STOPPED)
    fired = next(event for event in job.events() if event.type == "io.watchstep.alert.firing")
    assert fired.data["finding"]["tensor"] == "1:output"


@pytest.mark.ci
def test_a_healthy_run_is_left_alone(estimate: Estimator, caplog: pytest.LogCaptureFixture) -> None:
    rules = [non_finite_values().stop().notify("of-nobody")]
    job = changed(estimate, program="healthy.py", rules=rules).fit()
    assert "receiver 'of-nobody' does not exist" in caplog.text
    assert job.status() == JobStatus("ended", 0)
    assert job.run_state().info.state == "completed"
    assert job.run().steps() == list(range(30))
    assert not list(job.client().alerts(job.id))
    assert not list(job.client().actions(job.id))
    # Where the training takes long, the recorder's line that a service evaluates the run is in the log, too.
    assert b"trained to the end" in written(job).splitlines()


def test_a_program_gets_what_it_would_have_without_watchstep(estimate: Estimator, folder: Path) -> None:
    arguments = ("3", "two words", "", "$HOME *", "--store", "--", "-c", "ä\n")
    job = changed(estimate, arguments=arguments, environment={"GIVEN": "x y"}).fit()
    plain = subprocess.run(
        [sys.executable, "tells.py", *arguments], cwd=folder, env={**os.environ, "GIVEN": "x y"}, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert (job.status(), written(job)) == (JobStatus("ended", plain.returncode), plain.stdout)
    assert job.run_state().info.state == "failed"


@pytest.mark.ci
def test_words_of_a_command_line_and_a_name_with_a_space(estimate: Estimator, folder: Path) -> None:
    (folder / "of two words.py").write_text("raise SystemExit(4)")
    assert changed(estimate, program="of two words.py").fit().status().exit_code == 4
    line = f"{sys.executable} -c 'raise SystemExit(7)'"
    assert changed(estimate, program=line).fit().status().exit_code == 7


def test_a_stop_reaches_the_program_and_is_recorded(estimate: Estimator, folder: Path) -> None:
    ready = folder / "waits.ready"
    job = changed(estimate, program="waits.py", arguments=(str(ready),), on_stop="ignore").fit(wait=False)
    eventually(ready.exists, SECONDS)
    assert job.status().state == "running"
    assert job.handle in job.backend.jobs()
    with pytest.raises(TimeoutError):
        job.wait(0.0)
    taken_up = Job(JobRecord.from_data(json.loads(json.dumps(job.record.as_data()))))
    taken_up.backend.stop(taken_up.handle)
    assert taken_up.wait(SECONDS) == JobStatus("ended", 5)
    assert written(job) == b"asked to end\n"
    job.stop("it is over already")
    eventually(lambda: [action.outcome for action in job.client().actions(job.id)], SECONDS)
    (action,) = job.client().actions(job.id)
    assert (action.kind, job.status()) == ("stop", JobStatus("ended", 5))


def test_a_missing_program_starts_nothing(estimate: Estimator) -> None:
    with pytest.raises(SubmissionRejectedError, match=r"missing\.py"):
        changed(estimate, program="missing.py").fit()
    with pytest.raises(SubmissionRejectedError, match="program is empty"):
        changed(estimate, program="").fit()
    with pytest.raises(ConfigError, match="on_stop 'save'"):
        changed(estimate, on_stop="save")
    job = changed(estimate, program=["no-such-program", "x"]).fit()
    assert job.status() == JobStatus("ended", 2)
    assert b"no-such-program" in written(job)
    assert estimate.backend.jobs() == []


def test_a_service_that_is_down_or_a_rule_that_is_none_starts_nothing(estimate: Estimator) -> None:
    with pytest.raises(ServiceError):
        changed(estimate, service="http://127.0.0.1:9").fit()
    with pytest.raises(WatchstepError, match="is not a rule"):
        changed(estimate, rules=["non_finite_values"]).fit()
    assert estimate.backend.jobs() == []


class Elsewhere(Local):
    """A backend that no service knows."""

    kind: ClassVar[str] = "elsewhere"


def test_a_job_that_cannot_be_bound_is_not_left_running(estimate: Estimator, folder: Path) -> None:
    ready = folder / "unbound.ready"
    with pytest.raises(WatchstepError, match="elsewhere"):
        changed(estimate, backend=Elsewhere(), program="waits.py", arguments=(str(ready),)).fit(wait=False)
    assert estimate.backend.jobs() == []


def test_a_launch_of_nobody_is_told() -> None:
    with pytest.raises(NotFoundError, match="no launch is known"):
        Job.reattach("never-launched")


def test_without_a_service_the_backend_alone_stops_it(estimate: Estimator, folder: Path) -> None:
    ready = folder / "alone.ready"
    job = changed(estimate, program="waits.py", arguments=(str(ready),)).fit(wait=False)
    eventually(ready.exists, SECONDS)
    data = {**job.record.as_data(), "judge": {"url": "http://127.0.0.1:9", "home": "", "store": ""}}
    alone = Job(JobRecord.from_data(data))
    alone.stop(grace_seconds=SECONDS)
    assert job.status() == JobStatus("ended", 5)


@pytest.mark.ci
def test_every_module_of_the_launching_side_imports_without_the_server() -> None:
    program = _BLOCKED.format(blocked=(*SERVER, *OF_BACKENDS), of_backends=OF_BACKENDS)
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
