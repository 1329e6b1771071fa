from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import Bench
from tests.launch.backends.slurm.slurm_cluster import SlurmCluster
from watchstep_launch.backends.slurm.backend import Slurm

pytestmark = pytest.mark.ci


@pytest.fixture
def bench(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Bench]:
    held = Bench(Slurm(partition="all"), tmp_path)
    yield held
    held.close()
