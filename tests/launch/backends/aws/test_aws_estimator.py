"""Three lines on SageMaker: recorded on S3, judged by a real service beside them, stopped by the rule.

On a stand-in before moto, whose containers are processes of this machine: no AWS was met.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import S3
from tests.launch.backends.aws.aws_bench import SAGEMAKER
from tests.launch.backends.aws.sagemaker_stand_in import SageMakerStandIn
from tests.launch.test_estimator import TRAIN
from tests.services.jobs import eventually
from watchstep.stopping import EXIT_STOPPED, EXIT_TOMBSTONE
from watchstep_launch import Estimator, Job, SageMaker
from watchstep_rules import non_finite_values

pytestmark = pytest.mark.release

SECONDS = 180.0


@pytest.fixture
def folder(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program, a bucket, and a home for the service beside them."""
    s3.make_bucket("runs")
    (tmp_path / "train.py").write_text(TRAIN)
    for name in ("WATCHSTEP_SERVICE", "WATCHSTEP_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WATCHSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WATCHSTEP_IDLE_SECONDS", "300")
    yield tmp_path
    for note in (tmp_path / "home").rglob("service.json"):
        os.kill(json.loads(note.read_text())["process"]["pid"], signal.SIGTERM)
        eventually(partial(_gone, note), SECONDS)


def _gone(path: Path) -> bool:
    return not path.exists()


def test_a_fault_is_stopped_by_its_rule(folder: Path, sagemaker: SageMakerStandIn) -> None:
    backend = SageMaker(**SAGEMAKER)
    given: dict[str, Any] = {"backend": backend, "store": "s3://runs/all", "folder": folder}
    rules = [non_finite_values().stop()]
    job = Estimator("train.py", rules=rules, arguments=("12", "100000"), **given).fit(wait=False)
    events = {event.type.removeprefix("io.watchstep."): event.data for event in job.events()}
    assert events["alert.firing"]["step"] == 12
    assert events["alert.firing"]["finding"]["tensor"]
    assert (events["stop.done"]["how"], events["run.ended"]["state"]) == ("cooperative", "stopped")
    status = job.wait(SECONDS)
    assert (status.state, status.exit_code) == ("ended", EXIT_STOPPED)
    assert b"trained to the end" not in b"".join(job.logs())
    taken_up = Job.reattach(job.id)
    assert (taken_up.handle, taken_up.status().exit_code) == (job.handle, EXIT_STOPPED)
    assert backend.jobs() == []
    again = Estimator("train.py", arguments=("-1", "3"), **given)
    assert again.fit(run=job.id).status().exit_code == EXIT_TOMBSTONE
