"""Creating a job together with its Secret, and finding a job's objects by their UIDs.

Settings of Kubernetes, and the manifest built from them.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from watchstep.errors import ConfigError
from watchstep.stopping import EXIT_STOPPED, EXIT_TOMBSTONE
from watchstep.wrapper.environment import RESTARTS
from watchstep_launch.backend import BackendDownError, BackendModel, Launch, SubmissionRejectedError
from watchstep_launch.backends.kubernetes.identity import KubernetesRefusedError, Resource

if TYPE_CHECKING:
    from watchstep_launch.backends.kubernetes.client import KubernetesClient


Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?$", max_length=40)]
Word = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f]+$", max_length=500)]

_ONLY_OF_JOBS = (
    "restarts", "grace_seconds", "keep_seconds", "working_directory", "service_account", "node_selector", "pod_spec", "container",
)  # fmt: skip


class KubernetesSettings(BackendModel):
    """Settings of the Kubernetes backend. The service only uses ``namespace`` and ``context``: it submits nothing."""

    namespace: Label = Field("default", description="Namespace of the jobs.")
    image: Word | None = Field(
        None,
        description="Container image with the program and watchstep; a TrainJob defaults to its runtime's image.",
    )
    context: str | None = Field(
        None,
        description="Context of the kubeconfig; by default its current one, else the cluster that this process runs in.",
    )
    resource: Literal["Job", "TrainJob"] | None = Field(
        None, description="Kind of the object; by default a Job for one worker, a TrainJob for several."
    )
    workers: int = Field(1, ge=1, description="Number of pods that run the command.")
    runtime: Name = Field("torch-distributed", description="Kubeflow runtime of a TrainJob.")
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = Field(
        "ClusterTrainingRuntime",
        description="Whether the runtime belongs to the cluster or to the namespace.",
    )
    gpus: int | None = Field(None, ge=1, description="GPUs of each pod.")
    gpu_resource: Word = Field("nvidia.com/gpu", description="The cluster's name of the GPU resource.")
    cpus: Quantity | None = Field(None, description="CPU request of each pod: 4, 500m.")
    memory: Quantity | None = Field(None, description="Memory request and limit of each pod: 64Gi.")
    restarts: int = Field(
        0, ge=0, le=100, description="How often a pod that failed or was evicted is replaced."
    )
    grace_seconds: int = Field(
        120, ge=1, description="Seconds from SIGTERM, on a stop or an eviction, to SIGKILL."
    )
    keep_seconds: int = Field(
        604_800, ge=60, description="Seconds that a finished Job is kept, with its output."
    )
    working_directory: Word | None = Field(
        None, description="Working directory of the command; by default the image's own."
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
        """The kind of the object that runs the command."""
        return self.resource or ("Job" if self.workers == 1 else "TrainJob")

    @model_validator(mode="after")
    def _check_resource(self) -> KubernetesSettings:
        if self.runs_as == "Job":
            if self.workers > 1:
                raise ValueError("a Job has one worker: for several, omit resource or set it to 'TrainJob'")
            return self
        fields = type(self).model_fields
        for name in _ONLY_OF_JOBS:
            if getattr(self, name) != fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} applies to a Job only: a TrainJob's runtime defines it")
        return self


CONTAINER = "main"
LABELS = {"app.kubernetes.io/managed-by": "watchstep"}
"""Label of jobs that Watchstep submitted."""

LAUNCH = "watchstep.launch"
"""Annotation with a value unique to each submission, by which a submission without answer is found."""

_MAX_NAME_LENGTH = 40
"""Pod names are derived from the job's name, and are limited to 63 characters: ``NAME-node-0-15-x7k2p``."""

_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_INDEX_FAILURES = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"
_SET_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"

Manifest = dict[str, Any]


def manifest(launch: Launch, settings: KubernetesSettings) -> Manifest:
    """Return the Job or TrainJob of a launch. Arguments and values reach the program unchanged.

    Raises:
        ConfigError: an argument or a variable cannot be passed to a container.
    """
    launch = replace(launch, name=name_of(launch.name))
    job = _job(launch, settings) if settings.runs_as == "Job" else _train_job(launch, settings)
    job["metadata"] = {
        "name": launch.name,
        "namespace": settings.namespace,
        "labels": {**settings.labels, **LABELS},
        "annotations": {LAUNCH: secrets.token_hex(8)},
    }
    return job


def secret(launch: Launch, owner: Manifest) -> Manifest:
    """Return the Secret with a launch's secret variables. Its owner is the Job or TrainJob, with which it is deleted."""
    metadata = owner["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": dict(LABELS),
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
    """Return the name of a launch's job: the launch's name, shortened so that the pods' names fit."""
    if not launch:
        return f"ws-{secrets.token_hex(8)}"
    name = launch if launch[0].isalpha() else f"j-{launch}"  # the name of a TrainJob must begin with a letter
    if len(name) <= _MAX_NAME_LENGTH:
        return name
    return f"{name[: _MAX_NAME_LENGTH - 9].rstrip('-')}-{hashlib.sha256(launch.encode()).hexdigest()[:8]}"


def _job(launch: Launch, settings: KubernetesSettings) -> Manifest:
    if not settings.image:
        raise ConfigError(
            "backend kubernetes: image is not set", 'set it, as in Kubernetes(image="registry/train:1", …)'
        )
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
        # Otherwise the program is the first process of its PID namespace, where an unhandled SIGTERM is ignored.
        "shareProcessNamespace": True,
        **settings.pod_spec,
        "restartPolicy": "Never",  # required by the exit code policy; also keeps each start's output
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
            # Only an indexed Job tells its pods how often they were started before.
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": settings.restarts,
            "backoffLimitPerIndex": settings.restarts,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": stopped}]},
            "ttlSecondsAfterFinished": settings.keep_seconds,
            "template": {"metadata": {"labels": dict(LABELS)}, "spec": pod},
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
    sections = {"requests": requests, "limits": limits}
    return {name: value for name, value in sections.items() if value}


def _words(launch: Launch) -> list[str]:
    return [_literal("an argument", word) for word in launch.command]


def _variables(launch: Launch, restarts: str) -> list[Manifest]:
    """Return the environment. Secret variables are references, so that the job's description does not reveal them."""
    for name in (*launch.environment, *launch.secrets):
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(
                f"environment variable {name!r} has an invalid name for a pod",
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


def _literal(label: str, text: str, *, show: bool = True) -> str:
    """Escape a text, because Kubernetes expands ``$(NAME)`` and replaces ``$$`` by ``$``."""
    if "\0" in text:
        raise ConfigError(
            f"{label} contains a zero byte{': ' + repr(text[:80]) if show else ''}", "remove it"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{label} is not valid Unicode ({error.reason})", "correct or remove it") from error
    return text.replace("$", "$$")


_JOB_SET_NAME = "jobset.sigs.k8s.io/jobset-name"
_GROUPS: Mapping[str, str] = {
    "Job": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "Secret": "/api/v1/namespaces/{namespace}/secrets",
    "TrainJob": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs",
}

Object = dict[str, Any]


def path_of(kind: str, namespace: str, name: str = "") -> str:
    """Return the path of an object, or of all objects of a kind if ``name`` is empty."""
    collection = _GROUPS[kind].format(namespace=namespace)
    return f"{collection}/{name}" if name else collection


def path_to(object_: Object, kind: str) -> str:
    """Return the path of an existing object."""
    return path_of(kind, object_["metadata"]["namespace"], object_["metadata"]["name"])


def pods_of(client: KubernetesClient, resource: Resource, job: Object) -> list[Object]:
    """Return all existing pods of a Job or TrainJob, including ended ones.

    Raises:
        BackendError, KubernetesRefusedError: the request failed.
    """
    if resource == "Job":
        return _pods_of_job(client, job)
    metadata = job["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    job_set = client.find(path_of("JobSet", namespace, name))
    if job_set is None or not _is_owned(job_set, {metadata["uid"]}):
        return []
    selector = f"{_JOB_SET_NAME}={name}"
    jobs = _owned(client, "Job", namespace, selector, {job_set["metadata"]["uid"]})
    return _owned(client, "Pod", namespace, selector, {owner["metadata"]["uid"] for owner in jobs})


def _pods_of_job(client: KubernetesClient, job: Object) -> list[Object]:
    labels = job["spec"].get("selector", {}).get("matchLabels")
    if not labels:  # not assigned by the cluster yet
        return []
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    metadata = job["metadata"]
    return _owned(client, "Pod", metadata["namespace"], selector, {metadata["uid"]})


def _owned(
    client: KubernetesClient, kind: str, namespace: str, selector: str, owners: set[str]
) -> list[Object]:
    objects = client.read(path_of(kind, namespace), labelSelector=selector)["items"]
    return [object_ for object_ in objects if _is_owned(object_, owners)]


def _is_owned(object_: Object, owners: set[str]) -> bool:
    return any(reference["uid"] in owners for reference in object_["metadata"].get("ownerReferences") or ())


_ATTEMPTS = 3
_EXISTS = 409


def submit(client: KubernetesClient, launch: Launch, settings: KubernetesSettings) -> Object:
    """Create the Job or TrainJob of a launch. Returns it as the cluster stores it.

    The Secret is created after the job that owns it, so that none remains when the job is refused or deleted. The job's pods
    cannot start before the Secret exists.

    Raises:
        SubmissionRejectedError: the cluster refused the job; nothing remains.
        BackendError: the cluster does not answer, or refuses the credentials.
    """
    try:
        requested = manifest(launch, settings)
    except ConfigError as error:
        raise SubmissionRejectedError(error.what, error.hint) from error
    kind = settings.runs_as
    job = _create(client, requested, path_of(kind, settings.namespace), settings)
    if launch.secrets:
        try:
            _create_secret(client, secret(launch, job))
        except BaseException as error:
            _delete_created(client, job)
            if isinstance(error, KubernetesRefusedError):
                raise _rejected(error, settings) from error
            raise
    return job


def submitted_job(client: KubernetesClient, name: str, settings: KubernetesSettings) -> Object | None:
    """Return the Job or TrainJob of a launch whose submission has ended; None if there is none. A job without its Secret is deleted.

    Raises:
        BackendDownError: the job is being deleted.
    """
    job = client.find(path_of(settings.runs_as, settings.namespace, name_of(name)))
    if job is None or not LABELS.items() <= (job["metadata"].get("labels") or {}).items():
        return None
    if "deletionTimestamp" in job["metadata"]:
        raise BackendDownError(f"job {name!r} is being deleted", "try again once it is gone")
    if _lacks_secret(client, job, settings):
        _delete_created(client, job)
        return None
    return job


def _lacks_secret(client: KubernetesClient, job: Object, settings: KubernetesSettings) -> bool:
    metadata = job["metadata"]
    if metadata["name"] not in [_secret_of(variable) for variable in _variables_of(job)]:
        return False
    existing = client.find(path_of("Secret", settings.namespace, metadata["name"]))
    owners = (existing or {}).get("metadata", {}).get("ownerReferences") or ()
    return metadata["uid"] not in [owner["uid"] for owner in owners]


def _variables_of(job: Object) -> list[Object]:
    if job["kind"] == "TrainJob":
        return list(job["spec"]["trainer"].get("env") or ())
    containers = job["spec"]["template"]["spec"]["containers"]
    return [variable for container in containers for variable in container.get("env") or ()]


def _secret_of(variable: Object) -> str:
    reference = (variable.get("valueFrom") or {}).get("secretKeyRef") or {}
    return str(reference.get("name", ""))


def _create(client: KubernetesClient, requested: Object, path: str, settings: KubernetesSettings) -> Object:
    name, nonce = requested["metadata"]["name"], requested["metadata"]["annotations"][LAUNCH]
    try:
        return client.create(path, requested)
    except KubernetesRefusedError as error:
        job = client.find(f"{path}/{name}") if error.code == _EXISTS else None
        if job is None or not _is_mine(job, nonce):
            raise _rejected(error, settings) from error
        return job
    except BackendDownError as error:
        job = _find_created(client, f"{path}/{name}", nonce)
        if job is None:
            raise BackendDownError(
                f"{error.what}; it is unknown whether {requested['kind']} {name!r} was accepted",
                f"look for it once the cluster answers: kubectl get {requested['kind'].lower()} {name} -n {settings.namespace}",
            ) from error
        return job


def _find_created(client: KubernetesClient, path: str, nonce: str) -> Object | None:
    """Return a job whose submission got no answer."""
    for attempt in range(_ATTEMPTS):
        time.sleep(0.3 * attempt)
        try:
            job = client.find(path)
        except (BackendDownError, KubernetesRefusedError):
            continue
        if job is not None and _is_mine(job, nonce):
            return job
    return None


def _is_mine(job: Object, nonce: str) -> bool:
    return bool(job["metadata"].get("annotations", {}).get(LAUNCH) == nonce)


def _create_secret(client: KubernetesClient, requested: Object) -> None:
    metadata = requested["metadata"]
    path = path_of("Secret", metadata["namespace"])
    try:
        client.create(path, requested)
    except (BackendDownError, KubernetesRefusedError) as error:
        if isinstance(error, KubernetesRefusedError) and error.code != _EXISTS:
            raise
        existing = client.find(f"{path}/{metadata['name']}")
        owners = (existing or {}).get("metadata", {}).get("ownerReferences") or ()
        if metadata["ownerReferences"][0]["uid"] not in [owner["uid"] for owner in owners]:
            raise


def _delete_created(client: KubernetesClient, job: Object) -> None:
    try:
        client.delete(path_to(job, job["kind"]), job["metadata"]["uid"])
    except KubernetesRefusedError as error:
        raise BackendDownError(
            f"{job['kind']} {job['metadata']['name']!r} was accepted, and can neither start nor be deleted ({error.message})",
            "delete it with kubectl",
        ) from error


def _rejected(error: KubernetesRefusedError, settings: KubernetesSettings) -> SubmissionRejectedError:
    kind = settings.runs_as
    if error.code == 404 and "namespaces" in error.message:
        return SubmissionRejectedError(
            f"Kubernetes rejected the {kind}: {error.message}",
            f"create namespace {settings.namespace}, or use another",
        )
    if error.code == 404 and kind == "TrainJob":
        return SubmissionRejectedError(
            f"Kubernetes rejected the TrainJob: its API is not installed ({error.message})",
            "install Kubeflow Trainer, or use one worker, which a Job runs",
        )
    return SubmissionRejectedError(
        f"Kubernetes rejected the {kind}: {error.message}",
        "correct the backend's options or the launch, and submit again",
    )
