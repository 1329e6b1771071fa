"""Settings of Kubernetes, and the manifest made from them."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from watchstep.errors import ConfigError
from watchstep.stopping import EXIT_STOPPED, EXIT_TOMBSTONE
from watchstep.wrapper.environment import RESTARTS
from watchstep_launch.backend import BackendModel, Launch

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


CONTAINER = "main"
OURS = {"app.kubernetes.io/managed-by": "watchstep"}
"""Label of what launchers of Watchstep submitted."""

LAUNCH = "watchstep.launch"
"""Annotation that one submission has and no other: by it one that got no answer is found."""

_LONGEST_NAME = 40
"""Names of pods are made of the job's, and must not exceed 63 characters: ``NAME-node-0-15-x7k2p``."""

_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_INDEX_FAILURES = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"
_SET_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"

Manifest = dict[str, Any]


def manifest(launch: Launch, settings: KubernetesSettings) -> Manifest:
    """The Job or TrainJob of a launch. Arguments and values reach the program as they are.

    Raises:
        ConfigError: something of it no container can be given.
    """
    launch = replace(launch, name=name_of(launch.name))
    made = _job(launch, settings) if settings.runs_as == "Job" else _train_job(launch, settings)
    made["metadata"] = {
        "name": launch.name,
        "namespace": settings.namespace,
        "labels": {**settings.labels, **OURS},
        "annotations": {LAUNCH: secrets.token_hex(8)},
    }
    return made


def secret(launch: Launch, owner: Manifest) -> Manifest:
    """The Secret with a launch's secret variables. It goes when its owner, the Job or TrainJob, does."""
    metadata = owner["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": dict(OURS),
            "ownerReferences": [
                {
                    "apiVersion": owner["apiVersion"],
                    "kind": owner["kind"],
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                }
            ],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": dict(launch.secrets),
    }


def name_of(launch: str) -> str:
    """What a launch's job is called: its name, where long ends of pods' names leave room for it."""
    if not launch:
        return f"ws-{secrets.token_hex(8)}"
    name = launch if launch[0].isalpha() else f"j-{launch}"  # a TrainJob's begins with a letter
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9].rstrip('-')}-{hashlib.sha256(launch.encode()).hexdigest()[:8]}"


def _job(launch: Launch, settings: KubernetesSettings) -> Manifest:
    if not settings.image:
        raise ConfigError("backend kubernetes: no image is named", 'Kubernetes(image="registry/train:1", …)')
    container = {
        **settings.container,
        "name": CONTAINER,
        "image": settings.image,
        "command": _words(launch),
        "env": _variables(launch, _INDEX_FAILURES),
        "resources": _resources(settings),
    }
    if settings.working_directory:
        container["workingDir"] = settings.working_directory
    pod: Manifest = {
        # Else the program is the first process of its PID namespace, where a SIGTERM that it does not handle is lost.
        "shareProcessNamespace": True,
        **settings.pod_spec,
        "restartPolicy": "Never",  # a policy for exit codes requires it, and each start keeps its own output
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "containers": [container],
    }
    if settings.service_account:
        pod["serviceAccountName"] = settings.service_account
    if settings.node_selector:
        pod["nodeSelector"] = dict(settings.node_selector)
    stopped = {
        "containerName": CONTAINER,
        "operator": "In",
        "values": [EXIT_STOPPED, EXIT_TOMBSTONE],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "spec": {
            # Of an indexed Job, and of no other, a pod is told how often it was started before.
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": settings.restarts,
            "backoffLimitPerIndex": settings.restarts,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": stopped}]},
            "ttlSecondsAfterFinished": settings.keep_seconds,
            "template": {"metadata": {"labels": dict(OURS)}, "spec": pod},
        },
    }


def _train_job(launch: Launch, settings: KubernetesSettings) -> Manifest:
    trainer: Manifest = {
        "numNodes": settings.workers,
        "command": _words(launch),
        "env": _variables(launch, _SET_RESTARTS),
    }
    if settings.image:
        trainer["image"] = settings.image
    if resources := _resources(settings):
        trainer["resourcesPerNode"] = resources
    reference = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": settings.runtime_kind,
        "name": settings.runtime,
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "spec": {"runtimeRef": reference, "trainer": trainer},
    }


def _resources(settings: KubernetesSettings) -> Manifest:
    requests: Manifest = {}
    limits: Manifest = {}
    if settings.cpus:
        requests["cpu"] = settings.cpus
    if settings.memory:
        requests["memory"] = limits["memory"] = settings.memory
    if settings.gpus:
        limits[settings.gpu_resource] = str(settings.gpus)
    held = {"requests": requests, "limits": limits}
    return {name: value for name, value in held.items() if value}


def _words(launch: Launch) -> list[str]:
    return [_literal("an argument", word) for word in launch.command]


def _variables(launch: Launch, restarts: str) -> list[Manifest]:
    """The environment; secret variables are references, so that nobody who sees the job sees them."""
    for name in (*launch.environment, *launch.secrets):
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(
                f"environment variable {name!r}: a pod cannot have it",
                "use letters, digits, '_', '-' and '.'",
            )
    for name, value in launch.secrets.items():
        _literal(f"environment variable {name}", value, show=False)
    return [
        *(
            {"name": name, "value": _literal(f"environment variable {name}", value)}
            for name, value in launch.environment.items()
            if name not in launch.secrets
        ),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": launch.name, "key": name}}}
            for name in launch.secrets
        ),
        {"name": RESTARTS, "valueFrom": {"fieldRef": {"fieldPath": restarts}}},
    ]


def _literal(what: str, text: str, *, show: bool = True) -> str:
    """Text that Kubernetes, which expands ``$(NAME)`` and makes one ``$`` of two, makes into the given one."""
    if "\0" in text:
        raise ConfigError(f"{what} has a zero byte{': ' + repr(text[:80]) if show else ''}", "leave it out")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is no Unicode text ({error.reason})", "leave it out") from error
    return text.replace("$", "$$")
