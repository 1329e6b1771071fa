"""Real clusters to run jobs on, each started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.estimator.slurm_cluster import SlurmCluster, missing, running_slurm


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    if why := missing():
        pytest.skip(why)
    with running_slurm() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """A cluster that commands of this process find."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.configuration))
    return slurm_cluster
