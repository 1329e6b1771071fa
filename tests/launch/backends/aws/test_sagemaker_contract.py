"""On a stand-in before moto, whose containers are processes of this machine: no AWS was met."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.backends.aws.aws_bench import hurried_sagemaker
from tests.launch.backends.aws.sagemaker_stand_in import SageMakerStandIn
from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import Bench


@pytest.fixture
def bench(sagemaker: SageMakerStandIn, tmp_path: Path) -> Iterator[Bench]:
    held = Bench(hurried_sagemaker(sagemaker), tmp_path, keeps_exit_codes=False)
    yield held
    held.close()
