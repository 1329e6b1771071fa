from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import Bench
from tests.launch.backends.ray.ray_cluster import RayCluster
from watchstep_launch.backends.ray.backend import Ray

pytestmark = pytest.mark.ci


@pytest.fixture
def bench(ray_cluster: RayCluster, tmp_path: Path) -> Iterator[Bench]:
    backend = Ray(address=ray_cluster.address, stop_seconds=5)
    held = Bench(backend, tmp_path, keeps_exit_codes=False, seconds=120.0)
    yield held
    held.close()
