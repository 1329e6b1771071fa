"""Creating a job with its Secret, both or neither, and finding what belongs to a job by UIDs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from watchstep.errors import ConfigError
from watchstep_launch.backend import BackendDownError, Launch, SubmissionRejectedError
from watchstep_launch.backends.kubernetes.identity import KubernetesRefusedError, Resource
from watchstep_launch.backends.kubernetes.manifest import (
    LAUNCH,
    OURS,
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
    """The address of an object; of all of the kind, without a name."""
    held = _GROUPS[kind].format(namespace=namespace)
    return f"{held}/{name}" if name else held


def path_to(found: Object, kind: str) -> str:
    """The address of an object that was read."""
    return path_of(kind, found["metadata"]["namespace"], found["metadata"]["name"])


def pods_of(client: KubernetesClient, resource: Resource, job: Object) -> list[Object]:
    """All pods of a Job or TrainJob that the cluster has, those that ended with them.

    Raises:
        BackendError, RefusedError: it could not be asked.
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
    return _owned(client, "Pod", namespace, selector, {one["metadata"]["uid"] for one in jobs})


def _pods_of_job(client: KubernetesClient, job: Object) -> list[Object]:
    labels = job["spec"].get("selector", {}).get("matchLabels")
    if not labels:  # the cluster has not given it one yet
        return []
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    metadata = job["metadata"]
    return _owned(client, "Pod", metadata["namespace"], selector, {metadata["uid"]})


def _owned(
    client: KubernetesClient, kind: str, namespace: str, selector: str, owners: set[str]
) -> list[Object]:
    held = client.read(path_of(kind, namespace), labelSelector=selector)["items"]
    return [one for one in held if _is_owned(one, owners)]


def _is_owned(found: Object, owners: set[str]) -> bool:
    return any(one["uid"] in owners for one in found["metadata"].get("ownerReferences") or ())


_LOOKS = 3
_EXISTS = 409


def submit(client: KubernetesClient, launch: Launch, settings: KubernetesSettings) -> Object:
    """The Job or TrainJob of a launch, as the cluster took it.

    The Secret comes after the job that owns it, so that none is left when the job is refused or deleted. Its pods
    cannot start before it is there.

    Raises:
        SubmissionRejectedError: the cluster refused it; nothing is left.
        BackendError: it could not be asked, or did not answer.
    """
    try:
        asked = manifest(launch, settings)
    except ConfigError as error:
        raise SubmissionRejectedError(error.what, error.hint) from error
    kind = settings.runs_as
    made = _created(client, asked, path_of(kind, settings.namespace), settings)
    if launch.secrets:
        try:
            _give(client, secret(launch, made))
        except BaseException as error:
            _take_back(client, made)
            if isinstance(error, KubernetesRefusedError):
                raise _rejected(error, settings) from error
            raise
    return made


def taken(client: KubernetesClient, name: str, settings: KubernetesSettings) -> Object | None:
    """The Job or TrainJob of a launch that nobody submits any more; None where there is none. One that lacks its Secret is deleted.

    Raises:
        BackendDownError: it is being deleted.
    """
    found = client.find(path_of(settings.runs_as, settings.namespace, name_of(name)))
    if found is None or not OURS.items() <= (found["metadata"].get("labels") or {}).items():
        return None
    if "deletionTimestamp" in found["metadata"]:
        raise BackendDownError(f"job {name!r}: is being deleted", "ask again once it is gone")
    if _lacks_secret(client, found, settings):
        _take_back(client, found)
        return None
    return found


def _lacks_secret(client: KubernetesClient, found: Object, settings: KubernetesSettings) -> bool:
    metadata = found["metadata"]
    if metadata["name"] not in [_secret_of(variable) for variable in _variables_of(found)]:
        return False
    held = client.find(path_of("Secret", settings.namespace, metadata["name"]))
    owners = (held or {}).get("metadata", {}).get("ownerReferences") or ()
    return metadata["uid"] not in [one["uid"] for one in owners]


def _variables_of(found: Object) -> list[Object]:
    if found["kind"] == "TrainJob":
        return list(found["spec"]["trainer"].get("env") or ())
    return [one for held in found["spec"]["template"]["spec"]["containers"] for one in held.get("env") or ()]


def _secret_of(variable: Object) -> str:
    reference = (variable.get("valueFrom") or {}).get("secretKeyRef") or {}
    return str(reference.get("name", ""))


def _created(client: KubernetesClient, asked: Object, path: str, settings: KubernetesSettings) -> Object:
    name, nonce = asked["metadata"]["name"], asked["metadata"]["annotations"][LAUNCH]
    try:
        return client.create(path, asked)
    except KubernetesRefusedError as error:
        found = client.find(f"{path}/{name}") if error.code == _EXISTS else None
        if found is None or not _is_mine(found, nonce):
            raise _rejected(error, settings) from error
        return found
    except BackendDownError as error:
        found = _looked_for(client, f"{path}/{name}", nonce)
        if found is None:
            raise BackendDownError(
                f"{error.what}; whether {asked['kind']} {name!r} was taken is not known",
                f"look for it once it answers: kubectl get {asked['kind'].lower()} {name} -n {settings.namespace}",
            ) from error
        return found


def _looked_for(client: KubernetesClient, path: str, nonce: str) -> Object | None:
    """A job whose submission got no answer."""
    for look in range(_LOOKS):
        time.sleep(0.3 * look)
        try:
            found = client.find(path)
        except (BackendDownError, KubernetesRefusedError):
            continue
        if found is not None and _is_mine(found, nonce):
            return found
    return None


def _is_mine(found: Object, nonce: str) -> bool:
    return bool(found["metadata"].get("annotations", {}).get(LAUNCH) == nonce)


def _give(client: KubernetesClient, asked: Object) -> None:
    metadata = asked["metadata"]
    path = path_of("Secret", metadata["namespace"])
    try:
        client.create(path, asked)
    except (BackendDownError, KubernetesRefusedError) as error:
        if isinstance(error, KubernetesRefusedError) and error.code != _EXISTS:
            raise
        found = client.find(f"{path}/{metadata['name']}")
        owners = (found or {}).get("metadata", {}).get("ownerReferences") or ()
        if metadata["ownerReferences"][0]["uid"] not in [one["uid"] for one in owners]:
            raise


def _take_back(client: KubernetesClient, made: Object) -> None:
    try:
        client.delete(path_to(made, made["kind"]), made["metadata"]["uid"])
    except KubernetesRefusedError as error:
        raise BackendDownError(
            f"{made['kind']} {made['metadata']['name']!r}: was taken, and can neither start nor be deleted ({error.said})",
            "delete it by kubectl",
        ) from error


def _rejected(error: KubernetesRefusedError, settings: KubernetesSettings) -> SubmissionRejectedError:
    kind = settings.runs_as
    if error.code == 404 and "namespaces" in error.said:
        return SubmissionRejectedError(
            f"Kubernetes took no {kind}: {error.said}",
            f"create namespace {settings.namespace}, or name another",
        )
    if error.code == 404 and kind == "TrainJob":
        return SubmissionRejectedError(
            f"Kubernetes took no TrainJob: its API is not installed ({error.said})",
            "install Kubeflow Trainer, or ask for one worker, which a Job runs",
        )
    return SubmissionRejectedError(
        f"Kubernetes took no {kind}: {error.said}",
        "correct the backend's options or the launch, and submit again",
    )
