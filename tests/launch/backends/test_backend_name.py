"""A job on a backend that an admin registered under a name: the service stops it through what is registered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.backends.kubernetes.double import Double, running_double
from tests.launch.test_relaunch import TRAIN
from watchstep.errors import ConfigError
from watchstep_launch import Estimator, Kubernetes
from watchstep_rules import non_finite_values
from watchstep_services.core.settings import load_settings
from watchstep_services.runs.registration import ensure_project
from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.tenancy import allow_backends, register_backend

SECONDS = 120.0
NAMESPACE = "research"


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    with running_double() as held:
        with held.cluster.lock:
            held.cluster.store.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        monkeypatch.setenv("KUBECONFIG", str(held.write_kubeconfig(tmp_path / "kubeconfig")))
        yield held


@pytest.fixture
def service(tmp_path: Path, double: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedService]:
    """One that is named by its URL, where an admin registered "gpu-east"."""
    settings = load_settings(
        home=tmp_path / "home", store=str(tmp_path / "store"), sweep_seconds=0.05, listing_seconds=0.05, grace_seconds=0.2
    )  # fmt: skip
    with EmbeddedService(settings) as held:
        with held.database.write() as session:
            ensure_project(session, held.service, "default")
            register_backend(session, "gpu-east", "kubernetes", {"namespace": NAMESPACE})
            allow_backends(session, "default", ["gpu-east"])
        monkeypatch.setenv("WATCHSTEP_TOKEN", held.operator_token)
        monkeypatch.setenv("WATCHSTEP_JOBS", str(tmp_path / "jobs"))
        yield held


@pytest.mark.ci
def test_the_service_stops_it_through_the_backend_of_that_name(
    service: EmbeddedService, double: Double, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    estimator = Estimator(
        "train.py",
        backend=Kubernetes(namespace=NAMESPACE, image="train:1", working_directory=str(tmp_path), grace_seconds=1),
        backend_name="gpu-east",
        store=tmp_path / "store",
        folder=tmp_path,
        rules=[non_finite_values().stop()],
        arguments=("unsaved", str(tmp_path)),
        service=service.url,
        on_stop="ignore",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"'gpu-west' is not registered for project 'default'") as refused:
        replace(estimator, backend_name="gpu-west").fit(run="refused")
    assert "gpu-east" in refused.value.hint
    assert double.objects("Job", NAMESPACE) == []

    job = estimator.fit(run="named", wait=False)
    told = {event.type.removeprefix("io.watchstep."): event.data for event in job.events()}
    assert told["stop.done"]["job"] == f"gpu-east:{job.handle.id}"
    assert told["stop.done"]["how"] != "cooperative"
    assert told["run.ended"]["state"] == "stopped"
    assert job.wait(SECONDS).is_over
    (submitted,) = double.objects("Job", NAMESPACE)
    assert submitted["metadata"]["name"] == job.handle.id
    assert double.objects("Job") == []
