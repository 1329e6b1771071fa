"""On a stand-in before moto, whose containers are processes of this machine: no AWS was met."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.backends.aws.aws_bench import hurried_batch
from tests.launch.backends.aws.batch_stand_in import BatchStandIn
from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import Bench


@pytest.fixture
def bench(batch: BatchStandIn, tmp_path: Path) -> Iterator[Bench]:
    held = Bench(hurried_batch(batch), tmp_path)
    yield held
    held.close()
