"""The same program on real clusters by the same lines: stopped where it goes wrong, let alone where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.estimator.launches import launch, missing, place

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["slurm", "ray"])
def test_a_fault_is_stopped_and_a_healthy_run_is_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := missing(kind):
        pytest.skip(why)
    for name in ("WATCHSTEP_SERVICE", "WATCHSTEP_TOKEN", "WATCHSTEP_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_CONF", "")
    with place(kind, tmp_path) as where:
        assert launch(where, faulty=True, number=0).amiss == ()
        assert launch(where, faulty=False, number=0).amiss == ()
