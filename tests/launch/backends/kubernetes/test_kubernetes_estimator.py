"""A launch on the stand-in for a cluster, from fault to stop, judged by a real service beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.backends.kubernetes.double import Double, running_double
from tests.launch.beside import end_service_of
from watchstep.stopping import EXIT_STOPPED, EXIT_TOMBSTONE
from watchstep_launch import Estimator, JobStatus, Kubernetes
from watchstep_rules import non_finite_values

pytestmark = pytest.mark.release

SECONDS = 180.0
BAD_STEP = 12

TRAIN = """
import sys, time
import torch

model = torch.nn.Linear(4, 1)
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


@pytest.fixture(scope="module")
def double() -> Iterator[Double]:
    with running_double() as held:
        yield held


@pytest.fixture(scope="module")
def folder(double: Double, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program, a kubeconfig, and a store beside which one service is started by the first launch."""
    held = tmp_path_factory.mktemp("kubernetes")
    (held / "train.py").write_text(TRAIN)
    double.write_kubeconfig(held / "kubeconfig")
    yield held
    end_service_of(held / "store")


@pytest.fixture
def estimate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Estimator:
    for name in ("WATCHSTEP_SERVICE", "WATCHSTEP_TOKEN", "WATCHSTEP_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WATCHSTEP_JOBS", str(folder / "jobs"))
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    backend = Kubernetes(image="train:1", working_directory=str(folder), restarts=2, grace_seconds=60)
    return Estimator("train.py", backend=backend, store=folder / "store", rules=[non_finite_values().stop()])


def changed(estimator: Estimator, **changes: object) -> Estimator:
    return Estimator(**{**vars(estimator), **changes})


def test_a_fault_is_stopped_by_its_rule_and_stays_stopped(estimate: Estimator, double: Double) -> None:
    job = changed(estimate, arguments=(str(BAD_STEP), "100000")).fit(wait=False)
    events = {event.type.removeprefix("io.watchstep."): event.data for event in job.events()}
    assert events["alert.firing"]["step"] == BAD_STEP
    assert (events["stop.done"]["how"], events["run.ended"]["state"]) == ("cooperative", "stopped")
    assert job.handle.id in str(events["stop.done"])
    status = job.wait(SECONDS)
    assert (status.state, status.exit_code) == ("ended", EXIT_STOPPED)  # and none of two restarts was made
    assert (
        len([pod for pod in double.objects("Pod") if pod["metadata"]["name"].startswith(job.handle.id)]) == 1
    )
    once_more = changed(estimate, arguments=("-1", "3")).fit(run=job.id)
    assert once_more.status().exit_code == EXIT_TOMBSTONE
    healthy = changed(estimate, arguments=("-1", "30")).fit()
    assert healthy.status() == JobStatus("ended", 0, healthy.status().detail)
    assert b"".join(healthy.logs()).endswith(b"trained to the end\n")


def test_a_program_that_does_not_take_part_is_stopped_by_the_cluster(estimate: Estimator) -> None:
    job = changed(estimate, arguments=(str(BAD_STEP), "100000"), on_stop="ignore").fit(wait=False)
    done = [event.data["how"] for event in job.events() if event.type == "io.watchstep.stop.done"]
    assert done == ["terminated"]
    assert job.wait(SECONDS).state == "cancelled"
