from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import Bench
from tests.launch.backends.kubernetes.double import Double, running_double
from watchstep_launch.backends.kubernetes.backend import Kubernetes


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[Double]:
    with running_double() as double:
        yield double


@pytest.fixture
def bench(kubernetes: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.write_kubeconfig(tmp_path / "kubeconfig")))
    backend = Kubernetes(image="training:1", working_directory=str(tmp_path))

    def deleted_and_made_anew(identity: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**identity, "uid": "3b9e9e4e-0000-4000-8000-000000000000"}

    held = Bench(backend, tmp_path, earlier=deleted_and_made_anew)
    yield held
    held.close()
