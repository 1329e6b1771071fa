"""Stopping and killing a job, so that its object stays and says afterwards how it ended.

A pod that is deleted takes its output and its exit code with it. So a stop gives each pod of a Job a deadline that has
passed: the kubelet sends SIGTERM, and SIGKILL after the pod's grace time, and the pod stays, failed. A Job that has no
program to ask gets a deadline itself. A TrainJob has neither: it is suspended, which deletes its pods, SIGTERM first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from watchstep_launch.backends.kubernetes.errors import KubernetesRefusedError
from watchstep_launch.backends.kubernetes.identity import Resource
from watchstep_launch.backends.kubernetes.objects import path_to
from watchstep_launch.backends.kubernetes.states import ASKED, has_started, is_live

if TYPE_CHECKING:
    from watchstep_launch.backends.kubernetes.client import KubernetesClient

_AT_ONCE = 1
"""Seconds; the least that a deadline can be. A pod is deleted with so much grace, not with none: the API would forget at once
one with none, though its program may still run."""

_OVERTAKEN = frozenset((404, 409))
"""It is gone, or another has its name, or it changed meanwhile: how it is then says the rest."""

_INVALID = 422

Object = dict[str, Any]


def stop(client: KubernetesClient, resource: Resource, job: Object, pods: Sequence[Object]) -> None:
    """Have a job's programs asked to end, and none started again.

    Raises:
        BackendError, RefusedError: it could not be asked for.
    """
    if resource == "TrainJob":
        _patch(client, resource, job, _asked("stop", suspend=True))
        return
    running = [pod for pod in pods if is_live(pod) and has_started(pod)]
    if not running:
        _end_job(client, job, "stop")
        return
    # None that fails from now on is replaced.
    failed = int(job.get("status", {}).get("failed") or 0)
    limit = min(failed, int(job["spec"].get("backoffLimit", failed)))
    _patch(client, resource, job, _asked("stop", backoffLimit=limit))
    for pod in pods:
        if is_live(pod) and pod["spec"].get("activeDeadlineSeconds") != _AT_ONCE:
            _patch(client, "Pod", pod, {"spec": {"activeDeadlineSeconds": _AT_ONCE}})


def kill(client: KubernetesClient, resource: Resource, job: Object, pods: Sequence[Object]) -> None:
    """Have a job's pods deleted, with a second's grace, and none started again.

    Raises:
        BackendError, RefusedError: it could not be asked for.
    """
    if resource == "TrainJob":
        _patch(client, resource, job, _asked("kill", suspend=True))
    else:
        _end_job(client, job, "kill")
    for pod in pods:
        if is_live(pod):
            _delete(client, "Pod", pod, _AT_ONCE)


def _end_job(client: KubernetesClient, job: Object, how: Literal["stop", "kill"]) -> None:
    if job["spec"].get("suspend"):
        # A deadline does not run while it is suspended; a queue that suspended it lets it go when it is deleted.
        _delete(client, "Job", job)
    else:
        _patch(client, "Job", job, _asked(how, activeDeadlineSeconds=_AT_ONCE))


def _asked(how: Literal["stop", "kill"], **spec: object) -> Object:
    return {"metadata": {"annotations": {ASKED: how}}, "spec": spec}


def _patch(client: KubernetesClient, kind: str, found: Object, body: Object) -> None:
    try:
        client.patch(path_to(found, kind), found["metadata"]["uid"], body)
    except KubernetesRefusedError as error:
        # An attempt to change a UID, which is another object's, is no valid patch.
        if error.code not in _OVERTAKEN and not (error.code == _INVALID and "metadata.uid" in error.said):
            raise


def _delete(client: KubernetesClient, kind: str, found: Object, grace_seconds: int | None = None) -> None:
    try:
        client.delete(path_to(found, kind), found["metadata"]["uid"], grace_seconds)
    except KubernetesRefusedError as error:
        if error.code not in _OVERTAKEN:
            raise
