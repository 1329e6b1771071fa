"""What a launched program records: the estimator's capture document, the project's, or the built-in configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.services.api.serving import serving
from tests.services.driving import Driven
from watchstep import Cadence, CaptureConfig
from watchstep.capture.config import Collection
from watchstep.errors import ConfigError
from watchstep.platform.transport import ServiceAddress, Transport
from watchstep_launch import Estimator, Local
from watchstep_services.auth import create_token
from watchstep_services.db.models import ProjectCapture, RunRow

PROGRAM = "import os, sys; sys.stdout.write(os.environ.get('WATCHSTEP_CAPTURE', 'none'))\n"
OWN = "import sys, watchstep\nwith watchstep.Hook(config=watchstep.CaptureConfig(overhead_budget=0.5)) as hook:\n    sys.stdout.write(str(hook.config.overhead_budget))\n"
ANY = "import sys, watchstep\nwith watchstep.Hook() as hook:\n    sys.stdout.write(str(hook.config.overhead_budget))\n"
PROJECT: dict[str, Any] = {"overhead_budget": 0.125}
LAUNCH: dict[str, Any] = {"collections": {"head": {"include": "head[.]", "tensors": {"every": 10}}}}


class ShortVariables(Local):
    """A backend that accepts few characters in a variable, as SageMaker does."""

    longest_variable: ClassVar[int] = 10


@pytest.fixture
def url(driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("WATCHSTEP_CAPTURE", "WATCHSTEP_RECORDER_TOKEN", "WATCHSTEP_OVERHEAD_BUDGET"):
        monkeypatch.delenv(name, raising=False)
    with serving(driven_sqlite.service) as url:
        monkeypatch.setenv("WATCHSTEP_TOKEN", create_token(driven_sqlite.service.database, "operator"))
        monkeypatch.setenv("WATCHSTEP_SERVICE", url)
        yield url


@pytest.fixture
def estimate(url: str, tmp_path: Path) -> Estimator:
    (tmp_path / "train.py").write_text(PROGRAM)
    return Estimator("train.py", backend=Local(), store=tmp_path / "store", folder=tmp_path, project="vision")


def put_project(url: str, document: Any) -> None:
    transport = Transport(ServiceAddress(url, os.environ["WATCHSTEP_TOKEN"]), 30.0)
    transport.call("PUT", "/v1/projects/vision/capture", body=document)


def output(estimator: Estimator, **changes: object) -> str:
    job = Estimator(**{**vars(estimator), **changes}).fit(wait=False)
    text = b"".join(job.logs(follow=True)).decode()
    assert job.status().exit_code == 0, text
    return text


@pytest.mark.ci
def test_the_content_of_a_file_reaches_the_job(estimate: Estimator, tmp_path: Path) -> None:
    path = tmp_path / "capture.yaml"
    path.write_text("collections: {head: {include: 'head[.]', tensors: {every: 10}}}\n")
    config = CaptureConfig(
        {
            **CaptureConfig().chosen,
            "head": Collection(include="head[.]", tensors=Cadence(every=10)),
        }
    )
    for capture in (path, str(path), LAUNCH, config):
        assert json.loads(output(estimate, capture=capture)) == LAUNCH
    assert output(estimate) == "none"


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        ("missing.yaml", "missing.yaml: No such file"),
        ({"colections": {}}, r"Estimator\(capture=…\): colections: unknown key"),
        (CaptureConfig(clock=lambda: 0.0), "custom clock"),
        (7, "invalid capture=7"),
    ],
)
def test_an_invalid_document_launches_nothing(
    estimate: Estimator, driven_sqlite: Driven, capture: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        output(estimate, capture=capture)
    with driven_sqlite.service.database.read() as session:
        assert session.query(RunRow).count() == 0


@pytest.mark.ci
def test_a_launch_without_a_document_receives_the_projects(estimate: Estimator, url: str) -> None:
    put_project(url, PROJECT)
    assert json.loads(output(estimate)) == PROJECT
    assert json.loads(output(estimate, capture=LAUNCH)) == LAUNCH
    own = {"WATCHSTEP_CAPTURE": json.dumps({"gate": False})}
    assert json.loads(output(estimate, environment=own)) == {"gate": False}
    assert output(estimate, project="other") == "none"


@pytest.mark.ci
def test_the_program_precedes_the_project(estimate: Estimator, url: str, tmp_path: Path) -> None:
    put_project(url, PROJECT)
    (tmp_path / "train.py").write_text(OWN)
    assert "0.5" in output(estimate)
    (tmp_path / "train.py").write_text(ANY)
    assert "0.125" in output(estimate)


def test_a_projects_document_that_the_backend_does_not_accept_is_left_out(
    estimate: Estimator, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    put_project(url, PROJECT)
    assert output(estimate, backend=ShortVariables()) == "none"
    assert "more than the backend's limit of 10 for a variable" in caplog.text


def wrapped(
    folder: Path, program: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    command = (
        str(Path(sys.executable).with_name("watchstep")), "run", "--store", str(folder / "runs"), "--project", "vision", *options, "--",
        sys.executable, str(folder / "train.py"),
    )  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **environment}
    )


@pytest.mark.ci
def test_watchstep_run_receives_the_projects_document(url: str, tmp_path: Path) -> None:
    put_project(url, PROJECT)
    done = wrapped(tmp_path, PROGRAM)
    assert json.loads(done.stdout) == PROJECT, done.stderr
    assert "recording what the capture document of project vision names" in done.stderr
    assert json.loads(wrapped(tmp_path, PROGRAM, WATCHSTEP_CAPTURE='{"gate":false}').stdout) == {
        "gate": False
    }
    file = tmp_path / "c.json"
    file.write_text(json.dumps(LAUNCH))
    assert json.loads(wrapped(tmp_path, PROGRAM, "--capture", str(file)).stdout) == LAUNCH
    assert "0.5" in wrapped(tmp_path, OWN).stdout
    assert "0.125" in wrapped(tmp_path, ANY).stdout


def test_a_token_that_only_records_receives_it_too(url: str, driven_sqlite: Driven, tmp_path: Path) -> None:
    put_project(url, PROJECT)
    token = create_token(driven_sqlite.service.database, "recorder", "vision")
    done = wrapped(tmp_path, PROGRAM, WATCHSTEP_TOKEN=token)
    assert json.loads(done.stdout) == PROJECT, done.stderr


def test_a_program_starts_without_an_answer_of_the_service(tmp_path: Path, url: str) -> None:
    done = wrapped(tmp_path, PROGRAM, WATCHSTEP_SERVICE="http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (0, "none")


@pytest.mark.ci
def test_a_document_of_a_later_version_is_left_out(
    tmp_path: Path, url: str, estimate: Estimator, driven_sqlite: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    put_project(url, PROJECT)
    with driven_sqlite.service.database.write() as session:
        session.get_one(ProjectCapture, "vision").document = {"of a later version": 1}
    done = wrapped(tmp_path, PROGRAM)
    assert (done.returncode, done.stdout) == (0, "none")
    assert "capture document of project vision: of a later version: unknown key" in done.stderr
    assert "records with the built-in configuration" in done.stderr
    assert output(estimate) == "none"
    assert "of a later version" in caplog.text


OWNERS: dict[str, Any] = {
    "rule": "similar_across_runs",
    "name": "elements",
    "params": {"run": "good", "elementwise": True, "every": 50},
}
NEEDS = "import os, sys; sys.stdout.write(os.environ.get('WATCHSTEP_NEEDS', ''))\n"


@pytest.mark.ci
def test_a_launch_captures_what_the_rules_of_the_project_need(
    estimate: Estimator, url: str, tmp_path: Path
) -> None:
    transport = Transport(ServiceAddress(url, os.environ["WATCHSTEP_TOKEN"]), 30.0)
    transport.call("POST", "/v1/projects/vision/runs", body={"run": "known", "rules": [OWNERS]})
    transport.call("POST", "/v1/projects/vision/runs", body={"run": "other"})
    need = {"rule": "elements", "collections": ["weights", "biases"], "every": 50, "modes": ["train"]}
    (tmp_path / "train.py").write_text(NEEDS)
    assert json.loads(wrapped(tmp_path, NEEDS, "--run", "known").stdout) == [need]
    assert wrapped(tmp_path, NEEDS, "--run", "other").stdout == ""
    job = estimate.fit(run="known", wait=False)
    assert json.loads(b"".join(job.logs(follow=True))) == [need]
