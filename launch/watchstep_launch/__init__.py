"""Launch jobs with rules attached on any backend, query their status and stop them. Does not require the service package."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watchstep_launch.backend import Backend as Backend
    from watchstep_launch.backend import BackendModel as BackendModel
    from watchstep_launch.backend import JobHandle as JobHandle
    from watchstep_launch.backend import JobStatus as JobStatus
    from watchstep_launch.backend import Launch as Launch
    from watchstep_launch.backends.aws.sagemaker import SageMaker as SageMaker
    from watchstep_launch.backends.command import Command as Command
    from watchstep_launch.backends.kubernetes.backend import Kubernetes as Kubernetes
    from watchstep_launch.backends.kubernetes.submission import manifest as manifest
    from watchstep_launch.backends.local.backend import Local as Local
    from watchstep_launch.backends.ray.backend import Ray as Ray
    from watchstep_launch.backends.slurm.backend import Slurm as Slurm
    from watchstep_launch.backends.slurm.backend import batch_script as batch_script
    from watchstep_launch.estimator import Estimator as Estimator
    from watchstep_launch.job import Job as Job
    from watchstep_launch.relaunch import Requeue as Requeue
    from watchstep_launch.relaunch import requeue as requeue

_MODULES = {
    "Backend": "backend",
    "BackendModel": "backend",
    "Command": "backends.command",
    "Estimator": "estimator",
    "Job": "job",
    "JobHandle": "backend",
    "JobStatus": "backend",
    "Kubernetes": "backends.kubernetes.backend",
    "Launch": "backend",
    "Local": "backends.local.backend",
    "Ray": "backends.ray.backend",
    "Requeue": "relaunch",
    "SageMaker": "backends.aws.sagemaker",
    "Slurm": "backends.slurm.backend",
    "batch_script": "backends.slurm.backend",
    "manifest": "backends.kubernetes.submission",
    "requeue": "relaunch",
}
"""Name → module in this package. Modules are imported on first use, so that an unused backend costs nothing."""

__all__ = [
    "Backend",
    "BackendModel",
    "Command",
    "Estimator",
    "Job",
    "JobHandle",
    "JobStatus",
    "Kubernetes",
    "Launch",
    "Local",
    "Ray",
    "Requeue",
    "SageMaker",
    "Slurm",
    "batch_script",
    "manifest",
    "requeue",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
