from __future__ import annotations

from watchstep_launch.backend import JobHandle
from watchstep_services.tenancy import digest_of

IDENTITY = {"cluster": "c", "name": "train-1", "submitted": 1000, "restarts": 0}


def test_a_job_that_slurm_started_again_is_the_same_and_another_is_not() -> None:
    job = digest_of("slurm", JobHandle("slurm", "7", IDENTITY))
    assert job == digest_of("slurm", JobHandle("gpus", "7", {**IDENTITY, "submitted": 2000, "restarts": 1}))
    assert job != digest_of("slurm", JobHandle("slurm", "8", IDENTITY))
    assert job != digest_of("slurm", JobHandle("slurm", "7", {**IDENTITY, "cluster": "d"}))
    assert job != digest_of("slurm", JobHandle("slurm", "7", {**IDENTITY, "name": "train-2"}))
