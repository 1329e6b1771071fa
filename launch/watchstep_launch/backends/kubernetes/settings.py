"""What users set of a backend on Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from watchstep_launch.backend import BackendModel

Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?$", max_length=40)]
Word = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f]+$", max_length=500)]

_ONLY_OF_JOBS = (
    "restarts", "grace_seconds", "keep_seconds", "working_directory", "service_account", "node_selector", "pod_spec", "container",
)  # fmt: skip


class KubernetesSettings(BackendModel):
    """Settings. Of a backend that is registered with a service, which submits nothing, namespace and context count."""

    namespace: Label = Field("default", description="Namespace of its jobs.")
    image: Word | None = Field(
        None,
        description="Image with the program and watchstep; a TrainJob takes its runtime's where it is left out.",
    )
    context: str | None = Field(
        None,
        description="Context of kubeconfig's; its current one where it is left out, else the cluster around this process.",
    )
    resource: Literal["Job", "TrainJob"] | None = Field(
        None, description="What runs it; where it is left out, a Job, and for several workers a TrainJob."
    )
    workers: int = Field(1, ge=1, description="Pods that the command is started in.")
    runtime: Name = Field("torch-distributed", description="Kubeflow's runtime that a TrainJob refers to.")
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = Field(
        "ClusterTrainingRuntime", description="Whether that is the cluster's or the namespace's."
    )
    gpus: int | None = Field(None, ge=1, description="GPUs of each pod.")
    gpu_resource: Word = Field("nvidia.com/gpu", description="What the cluster calls them.")
    cpus: Quantity | None = Field(None, description="CPUs that each pod asks for: 4, 500m.")
    memory: Quantity | None = Field(None, description="Memory of each pod, which it may not exceed: 64Gi.")
    restarts: int = Field(
        0, ge=0, le=100, description="How often a pod that failed or was evicted is replaced."
    )
    grace_seconds: int = Field(
        120, ge=1, description="So long after SIGTERM, of a stop or an eviction, the pod is killed."
    )
    keep_seconds: int = Field(
        604_800, ge=60, description="So long after its end the Job is kept, its output with it."
    )
    working_directory: Word | None = Field(
        None, description="Where the command runs; the image's own place where it is left out."
    )
    service_account: Name | None = Field(None, description="Service account of the pods.")
    node_selector: Mapping[str, str] = Field(default_factory=dict, description="Labels that nodes must have.")
    labels: Mapping[str, str] = Field(
        default_factory=dict,
        description="Labels of the Job or TrainJob: {'kueue.x-k8s.io/queue-name': 'gpu'}.",
    )
    pod_spec: Mapping[str, Any] = Field(
        default_factory=dict, description="Other fields of the pods' specification: volumes, tolerations."
    )
    container: Mapping[str, Any] = Field(
        default_factory=dict, description="Other fields of their container: volumeMounts, securityContext."
    )

    @property
    def runs_as(self) -> Literal["Job", "TrainJob"]:
        """What runs it."""
        return self.resource or ("Job" if self.workers == 1 else "TrainJob")

    @model_validator(mode="after")
    def _fits(self) -> KubernetesSettings:
        if self.runs_as == "Job":
            if self.workers > 1:
                raise ValueError("a Job has one worker: leave resource out, or say 'TrainJob', for several")
            return self
        fields = type(self).model_fields
        for name in _ONLY_OF_JOBS:
            if getattr(self, name) != fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} is a Job's: of a TrainJob it stands in its runtime")
        return self
