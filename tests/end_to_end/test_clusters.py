"""The same program on real clusters by the same lines: stopped where it goes wrong, let alone where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.estimator.launches import BAD_STEP, SECONDS, Place, launch, missing, place
from watchstep_launch import Estimator
from watchstep_rules import non_finite_values

pytestmark = pytest.mark.release


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
        assert how_stopped_by_the_backend(where) == "terminated"


def how_stopped_by_the_backend(where: Place) -> str:
    """How a job ends whose program does not take part: the service has its backend stop it."""
    job = Estimator(
        where.program,
        backend=where.backend,
        store=where.folder / "store",
        rules=[non_finite_values().stop()],
        arguments=(str(BAD_STEP), "1000000000", str(where.folder / "ignoring.pt")),
        folder=where.folder,
        on_stop="ignore",
    ).fit(wait=False)
    done = [event.data["how"] for event in job.events() if event.type == "io.watchstep.stop.done"]
    assert job.wait(SECONDS).is_over
    (how,) = done
    return str(how)
