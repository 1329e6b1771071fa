"""Jobs on real clusters of Slurm and Ray: their credentials, and a production service."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.conftest import S3
from tests.end_to_end.production import Production, producing
from tests.launch.backends.clustered import (
    PROJECT,
    SECONDS,
    Clustered,
    admit,
    launched,
    revoke_tokens_of_jobs,
)
from tests.launch.backends.ray import ray_cluster as rays
from tests.launch.backends.slurm import slurm_cluster as slurms
from tests.services.core.collector import collecting
from tests.services.jobs import eventually
from tests.services.postgres import Postgres
from tests.services.redis import running_redis
from watchstep import open_run
from watchstep.capture.upload.uploader import spill_folders, sync
from watchstep_launch import Backend, Ray, Slurm
from watchstep_launch.job import ENDED
from watchstep_services.api.routes import credentials
from watchstep_services.auth import create_token
from watchstep_services.core.settings import load_settings
from watchstep_services.core.store_location import StorePlace
from watchstep_services.db.engine import open_database
from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.stores.role import ScopedCredentials, scoped_credentials

pytestmark = pytest.mark.release
ROLE = "arn:aws:iam::123456789012:role/watchstep"
STORE = "s3://runs/tenants"


@pytest.fixture
def backends(request: pytest.FixtureRequest) -> dict[str, Backend]:
    """Those of which there are clusters here."""
    found: dict[str, Backend] = {}
    if not slurms.missing():
        request.getfixturevalue("slurm")
        found["slurm"] = Slurm(partition="all")
    if not rays.missing():
        found["ray"] = Ray(address=request.getfixturevalue("ray_cluster").address, stop_seconds=5)
    if not found:
        pytest.skip(f"{slurms.missing()}; {rays.missing()}")
    return found


@pytest.fixture
def production(
    backends: dict[str, Backend], s3: S3, postgres: Postgres, tmp_path: Path
) -> Iterator[Production]:
    del backends  # the worker finds them as this process does
    with (
        running_redis() as broker,
        collecting() as collector,
        producing(s3, postgres, broker, collector, tmp_path) as made,
    ):
        yield made


def ended(production: Production, run: str) -> bool:
    return production.get(run)["state"] in ENDED


def test_jobs_of_slurm_and_ray_are_stopped_by_a_worker_though_their_tokens_were_revoked(
    production: Production, backends: dict[str, Backend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database(production.environment["WATCHSTEP_DATABASE_URL"])
    admin = create_token(database, "admin")
    database.close()
    monkeypatch.setenv("WATCHSTEP_TOKEN", admin)
    production = replace(
        production, operator=admin
    )  # new tokens of an address that shows revoked ones must wait
    store = "s3://runs/tenants"
    with production.api(), production.workers(), ExitStack() as stack:
        admit(production.url, admin, {"url": store}, backends)
        programs = {
            name: stack.enter_context(launched(backend, tmp_path / name, production.url, store, {}))
            for name, backend in backends.items()
        }
        for program in programs.values():
            eventually(program.has_begun, SECONDS)
        assert revoke_tokens_of_jobs(production.url, admin) == len(programs)
        for program in programs.values():
            eventually(functools.partial(program.is_refused_by, "service"), SECONDS)
            (program.folder / "fault").touch()
        for name, program in programs.items():
            eventually(program.stop_done, SECONDS)
            job, run = program.job, f"/v1/projects/{PROJECT}/runs/{program.job.id}"
            done = program.stop_done() or {}
            assert (done["how"], job.status().is_over, program.lives) == ("terminated", True, False)
            assert f"{name}:{job.handle.id}" in done["detail"]
            assert job.backend.jobs() == []
            eventually(functools.partial(ended, production, run), SECONDS)
            assert production.get(run)["state"] == "stopped"
            (stop,) = [one for one in production.get(f"{run}/actions")["actions"] if one["kind"] == "stop"]
            assert stop["state"] == "done"
            types = [event["type"] for event in production.get(f"{run}/events")["events"]]
            assert types.count("io.watchstep.stop.requested") == types.count("io.watchstep.stop.done") == 1
            phases = {one["rule"]: one["phase"] for one in production.get(f"{run}/alerts")["alerts"]}
            assert phases["non_finite_values"] == "firing"


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


def stop_ended(program: Clustered) -> bool:
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
        eventually(functools.partial(stop_ended, program), SECONDS)
        assert job.run_state().info.state == "stopped"

        (left,) = spill_folders(spill_root / "jobs-of-it")
        synced = sync(left)
        assert (synced.why, synced.left) == ("", 0)
        run = open_run(f"{STORE}/{PROJECT}/{job.id}")
        assert run.steps() == list(range(len(run.steps())))
        assert len(run.steps()) > program.steps
        (end,) = run.ends()
        assert end.health["counts"].get("dropped_rows", 0) == 0
