from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.estimator.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.services.estimator.backend_contract import Bench
from tests.services.estimator.slurm_cluster import SlurmCluster
from watchstep_services.estimator.slurm import Slurm

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Bench]:
    held = Bench(Slurm(partition="all"), tmp_path)
    yield held
    held.close()
