"""Real clusters to run jobs on, each started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import S3
from tests.launch.backends.aws import aws_stand_in as stand_ins
from tests.launch.backends.aws.aws_stand_in import StandIn
from tests.launch.backends.aws.sagemaker_stand_in import SageMakerStandIn
from tests.launch.backends.ray import ray_cluster as rays
from tests.launch.backends.ray.ray_cluster import RayCluster
from tests.launch.backends.slurm import slurm_cluster as slurms
from tests.launch.backends.slurm.slurm_cluster import SlurmCluster
from tests.launch.beside import beside  # noqa: F401 - a fixture
from tests.service_fixtures import (  # noqa: F401 - fixtures
    _no_settings_from_outside,
    database,
    driven_sqlite,
    postgres,
    postgres_tables,
    sqlite,
    sqlite_factory,
    sqlite_tables,
)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    if why := slurms.missing():
        pytest.skip(why)
    with slurms.running_slurm() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """A cluster that commands of this process find."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.configuration))
    return slurm_cluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    if why := rays.missing():
        pytest.skip(why)
    with rays.running_ray() as cluster:
        yield cluster


@pytest.fixture
def stand_in(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Before moto, for what moto lacks; the environment leads clients of SageMaker to it."""
    s3.make_bucket("jobs")
    folder = tmp_path / "aws"
    folder.mkdir()
    with stand_ins.serving(s3.endpoint, folder) as server:
        server.workdir = tmp_path
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", server.url)
        yield server


@pytest.fixture
def sagemaker(stand_in: StandIn) -> Iterator[SageMakerStandIn]:
    held = SageMakerStandIn(stand_in)
    yield held
    held.close()
