"""Credentials that expire while a job runs on a real cluster: it trains on, nothing is lost, and a stop still reaches it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.conftest import S3
from tests.launch.backends.clustered import (
    PROJECT,
    SECONDS,
    Clustered,
    admit,
    launched,
    revoke_tokens_of_jobs,
)
from tests.launch.backends.ray import ray_cluster as rays
from tests.services.jobs import eventually
from watchstep import open_run
from watchstep.capture.upload.uploader import spill_folders, sync
from watchstep_launch import Backend, Ray, Slurm
from watchstep_launch.job import ENDED
from watchstep_services.api.routes import credentials
from watchstep_services.auth import create_token
from watchstep_services.core.settings import load_settings
from watchstep_services.core.store_location import StorePlace
from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.stores.role import ScopedCredentials, scoped_credentials

pytestmark = pytest.mark.ci

ROLE = "arn:aws:iam::123456789012:role/watchstep"
STORE = "s3://runs/tenants"


def short_lived(place: StorePlace, run: str, attempt: str) -> ScopedCredentials:
    """AWS lends none for less than a quarter of an hour."""
    given = scoped_credentials(place, run, attempt)
    return replace(given, expires_at=datetime.now(timezone.utc) + timedelta(seconds=2))


@pytest.fixture(params=["slurm", "ray"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "slurm":
        request.getfixturevalue("slurm")
        return Slurm(partition="all")
    if why := rays.missing():
        pytest.skip(why)
    return Ray(address=request.getfixturevalue("ray_cluster").address)


@pytest.fixture
def service(
    backend: Backend, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmbeddedService]:
    """It lends credentials for two seconds, of the role of the project's store."""
    monkeypatch.setattr(credentials, "scoped_credentials", short_lived)
    for bucket in ("own", "runs"):
        s3.make_bucket(bucket)
    settings = load_settings(
        home=tmp_path / "home",
        store="s3://own/runs",
        new_projects="by_admins",
        grace_seconds=60,
        listing_seconds=0.5,
    )
    with EmbeddedService(settings) as running:
        admin = create_token(running.service.database, "admin")
        monkeypatch.setenv("WATCHSTEP_TOKEN", admin)
        admit(running.url, admin, {"url": STORE, "role_arn": ROLE}, {backend.kind: backend})
        yield running


def ended(program: Clustered) -> bool:
    return program.job.run_state().info.state in ENDED


def test_a_job_whose_token_and_credentials_expire_trains_on_and_is_stopped(
    service: EmbeddedService, backend: Backend, tmp_path: Path, spill_root: Path
) -> None:
    variables = {"WATCHSTEP_CREDENTIALS": "service", "WATCHSTEP_SPILL": str(spill_root / "jobs-of-it")}
    with launched(backend, tmp_path / "job", service.url, STORE, variables) as program:
        job = program.job
        eventually(lambda: (job.run_state().info.last_step or 0) > 0, SECONDS)
        assert program.told["faults"] == {}
        assert revoke_tokens_of_jobs(service.url, os.environ["WATCHSTEP_TOKEN"]) == 1
        eventually(lambda: program.is_refused_by("service", "store"), SECONDS, lambda: program.told)
        before = program.steps
        eventually(lambda: program.steps > before + 100, SECONDS)
        assert job.status().state == "running"
        assert job.run_state().info.state == "running"

        job.stop("enough")
        eventually(program.stop_done, SECONDS)
        assert (program.stop_done() or {})["how"] == "terminated"
        assert (job.status().is_over, program.lives, job.backend.jobs()) == (True, False, [])
        eventually(functools.partial(ended, program), SECONDS)
        assert job.run_state().info.state == "stopped"

        (left,) = spill_folders(spill_root / "jobs-of-it")
        synced = sync(left)
        assert (synced.why, synced.left) == ("", 0)
        run = open_run(f"{STORE}/{PROJECT}/{job.id}")
        assert run.steps() == list(range(len(run.steps())))
        assert len(run.steps()) > program.steps
        (end,) = run.ends()
        assert end.health["counts"].get("dropped_rows", 0) == 0
