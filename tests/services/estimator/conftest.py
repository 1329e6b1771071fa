"""Real clusters to run jobs on, each started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.estimator import ray_cluster as rays
from tests.services.estimator import slurm_cluster as slurms
from tests.services.estimator.beside import beside  # noqa: F401 - a fixture
from tests.services.estimator.ray_cluster import RayCluster
from tests.services.estimator.slurm_cluster import SlurmCluster


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
