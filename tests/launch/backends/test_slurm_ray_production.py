"""Jobs of real clusters, launched through the API of production: a worker in a process of its own stops them.

Their tokens end meanwhile: what they write then, the service finds by looking.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import S3
from tests.end_to_end.production import Production, producing
from tests.launch.backends.clustered import PROJECT, SECONDS, admit, launched, revoke_tokens_of_jobs
from tests.launch.backends.ray import ray_cluster as rays
from tests.launch.backends.slurm import slurm_cluster as slurms
from tests.services.core.collector import collecting
from tests.services.jobs import eventually
from tests.services.postgres import Postgres
from tests.services.redis import running_redis
from watchstep_launch import Backend, Ray, Slurm
from watchstep_launch.job import ENDED
from watchstep_services.auth import create_token
from watchstep_services.db.engine import open_database

pytestmark = pytest.mark.ci


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
