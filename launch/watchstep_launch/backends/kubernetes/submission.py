"""Creating a job together with its Secret, and finding a job's objects by their UIDs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from watchstep.errors import ConfigError
from watchstep_launch.backend import BackendDownError, Launch, SubmissionRejectedError
from watchstep_launch.backends.kubernetes.identity import KubernetesRefusedError, Resource
from watchstep_launch.backends.kubernetes.manifest import (
    LABELS,
    LAUNCH,
    KubernetesSettings,
    manifest,
    name_of,
    secret,
)

if TYPE_CHECKING:
    from watchstep_launch.backends.kubernetes.client import KubernetesClient


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
