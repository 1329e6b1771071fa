"""Launch jobs with rules attached, on whatever runs them; ask how they are; stop them. Needs none of the service."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watchstep_services.estimator.aws_batch import AwsBatch as AwsBatch
    from watchstep_services.estimator.backend import Backend as Backend
    from watchstep_services.estimator.backend import JobHandle as JobHandle
    from watchstep_services.estimator.backend import JobStatus as JobStatus
    from watchstep_services.estimator.backend import Launch as Launch
    from watchstep_services.estimator.backend_model import BackendModel as BackendModel
    from watchstep_services.estimator.command import Command as Command
    from watchstep_services.estimator.estimator import Estimator as Estimator
    from watchstep_services.estimator.job import Job as Job
    from watchstep_services.estimator.kubernetes_jobs import Kubernetes as Kubernetes
    from watchstep_services.estimator.local import Local as Local
    from watchstep_services.estimator.ray_jobs import Ray as Ray
    from watchstep_services.estimator.relaunch import Requeue as Requeue
    from watchstep_services.estimator.relaunch import requeue as requeue
    from watchstep_services.estimator.sagemaker import SageMaker as SageMaker
    from watchstep_services.estimator.slurm import Slurm as Slurm

_PLACES = {
    "AwsBatch": "aws_batch",
    "Backend": "backend",
    "BackendModel": "backend_model",
    "Command": "command",
    "Estimator": "estimator",
    "Job": "job",
    "JobHandle": "backend",
    "JobStatus": "backend",
    "Kubernetes": "kubernetes_jobs",
    "Launch": "backend",
    "Local": "local",
    "Ray": "ray_jobs",
    "Requeue": "relaunch",
    "SageMaker": "sagemaker",
    "Slurm": "slurm",
    "requeue": "relaunch",
}
"""Name → module here. Imported when first used: no backend costs those who use another."""

__all__ = [
    "AwsBatch",
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
    "requeue",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
