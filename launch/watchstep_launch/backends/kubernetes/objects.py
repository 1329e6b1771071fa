"""Where a cluster keeps jobs, and what belongs to one: everything is told by UIDs, never by names alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from watchstep_launch.backends.kubernetes.identity import Resource

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
