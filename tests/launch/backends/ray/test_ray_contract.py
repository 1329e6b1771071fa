"""Ray, on a real cluster of this machine."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import WILLING, Bench
from tests.launch.backends.ray.ray_cluster import RayCluster, running_ray
from tests.services.jobs import eventually
from watchstep_launch.backend import JobNotFoundError, Launch, SubmissionRejectedError
from watchstep_launch.backends.ray.backend import Ray

pytestmark = pytest.mark.release
SECONDS = 120.0


@pytest.fixture(scope="module")
def other_cluster(ray_cluster: RayCluster) -> Iterator[RayCluster]:
    """Beside the first."""
    del ray_cluster
    with running_ray() as cluster:
        yield cluster


def bench_on(cluster: RayCluster, folder: Path) -> Bench:
    return Bench(
        Ray(address=cluster.address, stop_seconds=5), folder, keeps_exit_codes=False, seconds=SECONDS
    )


@pytest.fixture
def bench(ray_cluster: RayCluster, tmp_path: Path) -> Iterator[Bench]:
    held = bench_on(ray_cluster, tmp_path)
    yield held
    held.close()


@pytest.fixture
def other(other_cluster: RayCluster, tmp_path: Path) -> Iterator[Bench]:
    held = bench_on(other_cluster, tmp_path)
    yield held
    held.close()


def marker(folder: Path, name: str = "") -> Launch:
    """Makes the file ``began``."""
    return Launch(
        ("touch", str(folder / "began")), {}, folder, name=name or f"refused-{uuid.uuid4().hex[:8]}"
    )


def test_what_cannot_be_submitted_says_why_and_leaves_nothing(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    refused: tuple[tuple[dict[str, Any], str, str], ...] = (
        ({"runtime_env": {"pip": 7}}, "", r"runtime_env\['pip'\] must be of type"),
        ({"runtime_env": {"working_dir": "/no/such/folder"}}, "", "/no/such/folder must be an existing"),
        ({"runtime_env": {"working_dir": "nope://x"}}, "", "nope:"),
        ({"runtime_env": {"env_vars": ["SEED"]}}, "", "env_vars is"),
        ({"runtime_env": {"pip": object()}}, "", "must be of type"),
        ({"gpus": 1.5}, "", "must.*be whole numbers"),
        ({"resources": {"CPU": 1}}, "", "'num_cpus' and 'num_gpus'"),
        ({"resources": {"farm": -1}}, "", "cannot be negative"),
        ({}, "a/b", "is not a valid job name"),
        ({}, "n" * 64, "is not a valid job name"),
        ({}, "..", "is not a valid job name"),
    )
    for settings, name, why in refused:
        with pytest.raises(SubmissionRejectedError, match=why) as told:
            Ray(address=ray_cluster.address, **settings).submit(marker(tmp_path, name))
        assert told.value.hint
    assert Ray(address=ray_cluster.address).jobs() == []
    assert not (tmp_path / "began").exists()


def test_an_id_that_is_taken_is_refused_and_its_job_let_alone(bench: Bench) -> None:
    job = bench.launch(WILLING)
    with pytest.raises(SubmissionRejectedError, match=f"{job.id} already exists"):
        bench.backend.submit(marker(bench.folder, job.id))
    assert bench.backend.status(job).state == "running"
    assert bench.backend.jobs() == [job]


def test_what_the_cluster_cannot_prepare_ends_by_itself_with_the_reason(
    bench: Bench, ray_cluster: RayCluster
) -> None:
    away = Ray(address=ray_cluster.address, runtime_env={"working_dir": "https://127.0.0.1:9/train.zip"})
    job = away.submit(marker(bench.folder))
    status = bench.end_of(job)
    assert (status.state, status.exit_code) == ("ended", None)
    assert "runtime_env setup failed" in status.detail
    assert "Connection refused" in status.detail
    assert away.jobs() == []


def test_a_stop_of_what_waits_for_its_place_holds_once_it_has_it(
    bench: Bench, ray_cluster: RayCluster
) -> None:
    """Ray has no other way: whoever is to hear of the stop is not there before."""
    whole = Ray(address=ray_cluster.address, cpus=8, stop_seconds=5)
    holding = Bench(whole, bench.folder, keeps_exit_codes=False, seconds=SECONDS)
    first = holding.launch(WILLING)
    waiting = whole.submit(
        Launch(("sleep", "100000"), {}, bench.folder, name=f"waits-{uuid.uuid4().hex[:8]}")
    )
    eventually(lambda: "waiting for resources" in whole.status(waiting).detail, SECONDS)
    assert whole.stop(waiting).state == "queued"
    whole.stop(first)
    assert bench.end_of(first).state == "cancelled"
    assert bench.end_of(waiting).state == "cancelled"
    assert whole.jobs() == []


def test_a_job_of_one_cluster_is_nobody_at_the_other_even_where_a_namesake_runs(
    bench: Bench, other: Bench
) -> None:
    job = bench.launch(WILLING)
    assert other.backend.jobs() == []
    with pytest.raises(JobNotFoundError, match=job.id):
        other.backend.reattach(job.id)
    for call in (other.backend.status, other.backend.stop, other.backend.kill):
        assert call(job).state == "vanished"
    command = ("sleep", "100000")
    namesake = other.backend.submit(Launch(command, {}, other.folder, name=job.id))
    assert (namesake.id, namesake == job) == (job.id, False)
    eventually(lambda: other.backend.status(namesake).state == "running", SECONDS)
    for call in (other.backend.status, other.backend.stop, other.backend.kill):
        assert call(job).state == "vanished"
    assert other.backend.status(namesake).state == "running"
    other.backend.stop(namesake)
    assert other.end_of(namesake).state == "cancelled"
    assert bench.backend.status(job).state == "running"
    assert bench.backend.jobs() == [job]
