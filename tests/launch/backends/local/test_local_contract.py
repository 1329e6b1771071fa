from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import Bench
from watchstep_launch.backends.local.backend import Local


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    held = Bench(Local(folder=tmp_path / "jobs"), tmp_path)
    yield held
    held.close()
