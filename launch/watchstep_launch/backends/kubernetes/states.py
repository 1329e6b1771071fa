"""States of Kubernetes jobs and pods, ending them, and their logs.

A deleted pod loses its output and its exit code. A stop therefore gives each pod of a Job a deadline in the past: the kubelet
sends SIGTERM, and SIGKILL after the grace period, and the pod remains as failed. A Job without a running program gets a deadline
itself. A TrainJob supports neither: it is suspended, which deletes its pods after SIGTERM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from watchstep_launch.backend import LARGEST_PART, JobState, JobStatus, LogPart
from watchstep_launch.backends.kubernetes.identity import KubernetesRefusedError, Resource
from watchstep_launch.backends.kubernetes.submission import CONTAINER, path_to

if TYPE_CHECKING:
    from watchstep_launch.backends.kubernetes.client import KubernetesClient


END_REQUESTED = "watchstep.end"
"""Annotation of a job with a requested end: ``stop`` or ``kill``."""

_INDEX = "batch.kubernetes.io/job-completion-index"
_MAX_DETAIL = 300

Object = dict[str, Any]


def status_of(job: Object, pods: Sequence[Object]) -> JobStatus:
    """Return the status of a Job or TrainJob with its existing pods.

    A job is over when it reports so and none of its pods runs any more.
    """
    ended = condition(job, "Complete", "Failed")
    requested = job["metadata"].get("annotations", {}).get(END_REQUESTED, "")
    if ended is None and requested and _is_suspended(job):
        ended = condition(job, "Suspended")
    if ended is None or any(is_running(pod) for pod in pods):
        state: JobState = "running" if any(has_started(pod) for pod in pods) or ended else "queued"
        return JobStatus(state, detail=_shorten(_describe_job(job, pods)))
    detail = _shorten(_describe_condition(ended))
    if ended["type"] == "Complete":
        return JobStatus("ended", 0, detail)
    return JobStatus("cancelled" if requested else "ended", _exit_code(pods), detail)


def condition(job: Object, *types: str) -> Object | None:
    """Return an object's first true condition of one of these types."""
    conditions = job.get("status", {}).get("conditions") or ()
    return next((entry for entry in conditions if entry["type"] in types and entry["status"] == "True"), None)


def is_live(pod: Object) -> bool:
    """Whether a pod runs or may still run."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def is_running(pod: Object) -> bool:
    """Whether a pod's program runs, as far as the cluster knows."""
    return is_live(pod) and has_started(pod)


def has_started(pod: Object) -> bool:
    """Whether a pod's program runs or has run."""
    status = pod.get("status", {})
    return status.get("phase") in ("Running", "Succeeded", "Failed", "Unknown") or any(
        "running" in status.get("state", {}) or "terminated" in status.get("state", {})
        for status in _containers(pod)
    )


def in_order(pods: Iterable[Object]) -> list[Object]:
    """Sort pods by time of creation, then by name."""
    return sorted(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))


def container_of(pod: Object) -> str:
    """Return the name of the container that runs the program: Watchstep's own, or the first."""
    names = [str(container["name"]) for container in pod["spec"]["containers"]]
    return CONTAINER if CONTAINER in names else names[0]


def _is_suspended(job: Object) -> bool:
    return bool(job["spec"].get("suspend")) and condition(job, "Suspended") is not None


def _exit_code(pods: Sequence[Object]) -> int | None:
    """Return the first code that is not 0, among the last starts of all workers."""
    last: dict[tuple[str, str], Object] = {}
    for pod in in_order(pods):
        owner = next((reference["uid"] for reference in pod["metadata"].get("ownerReferences") or ()), "")
        last[owner, pod["metadata"].get("annotations", {}).get(_INDEX, "")] = pod
    codes = [code for pod in last.values() if (code := _code_of(pod)) is not None]
    return next((code for code in codes if code), 0 if codes else None)


def _code_of(pod: Object) -> int | None:
    name = container_of(pod)
    for container in _containers(pod):
        if container["name"] == name and "terminated" in container.get("state", {}):
            code = int(container["state"]["terminated"]["exitCode"])
            # Shells and container runtimes report a signal as 128 plus its number.
            return 128 - code if 128 < code <= 192 else code
    return None


def _containers(pod: Object) -> list[Object]:
    return list(pod.get("status", {}).get("containerStatuses") or ())


def _describe_job(job: Object, pods: Sequence[Object]) -> str:
    live = [pod for pod in in_order(pods) if is_live(pod)]
    if live:
        return "; ".join(dict.fromkeys(filter(None, map(_describe_pod, live))))
    if job["spec"].get("suspend"):
        return "suspended: waiting for admission"
    return "waiting for a restart" if pods else "no pod exists yet"


def _describe_pod(pod: Object) -> str:
    status = pod.get("status", {})
    if "deletionTimestamp" in pod["metadata"]:
        return "is being ended"
    for container in (*(status.get("initContainerStatuses") or ()), *_containers(pod)):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in ("ContainerCreating", "PodInitializing"):
            return _describe_condition(waiting)
    unscheduled = next(
        (
            entry
            for entry in status.get("conditions") or ()
            if entry["type"] == "PodScheduled" and entry["status"] == "False"
        ),
        None,
    )
    if unscheduled is not None:
        return _describe_condition(unscheduled)
    node = pod["spec"].get("nodeName", "")
    return f"{status.get('phase', 'Pending')}{' on ' if node else ''}{node}"


def _describe_condition(entry: Object) -> str:
    reason, message = str(entry.get("reason", "") or entry.get("type", "")), str(entry.get("message", ""))
    return f"{reason}: {message}" if message else reason


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_DETAIL else f"{line[: _MAX_DETAIL - 1]}…"


_MIN_GRACE_SECONDS = 1
"""The minimum of a deadline. Pods are deleted with this grace period instead of none, because the API forgets a pod without
grace period at once, though its program may still run."""

_CHANGED = frozenset((404, 409))
"""The object is gone, or another has its name, or it changed meanwhile. The next status query tells which."""

_INVALID = 422


def stop(client: KubernetesClient, resource: Resource, job: Object, pods: Sequence[Object]) -> None:
    """Request the end of a job's programs, without restarts.

    Raises:
        BackendError, KubernetesRefusedError: the request failed.
    """
    if resource == "TrainJob":
        _patch(client, resource, job, _end_request("stop", suspend=True))
        return
    running = [pod for pod in pods if is_live(pod) and has_started(pod)]
    if not running:
        _end_job(client, job, "stop")
        return
    # Prevent the replacement of pods that fail from now on.
    failed = int(job.get("status", {}).get("failed") or 0)
    limit = min(failed, int(job["spec"].get("backoffLimit", failed)))
    _patch(client, resource, job, _end_request("stop", backoffLimit=limit))
    for pod in pods:
        if is_live(pod) and pod["spec"].get("activeDeadlineSeconds") != _MIN_GRACE_SECONDS:
            _patch(client, "Pod", pod, {"spec": {"activeDeadlineSeconds": _MIN_GRACE_SECONDS}})


def kill(client: KubernetesClient, resource: Resource, job: Object, pods: Sequence[Object]) -> None:
    """Delete a job's pods with a grace period of one second, without restarts.

    Raises:
        BackendError, KubernetesRefusedError: the request failed.
    """
    if resource == "TrainJob":
        _patch(client, resource, job, _end_request("kill", suspend=True))
    else:
        _end_job(client, job, "kill")
    for pod in pods:
        if is_live(pod):
            _delete(client, "Pod", pod, _MIN_GRACE_SECONDS)


def _end_job(client: KubernetesClient, job: Object, how: Literal["stop", "kill"]) -> None:
    if job["spec"].get("suspend"):
        # A deadline does not apply while the job is suspended. Deleting it also releases it from the queue that suspended it.
        _delete(client, "Job", job)
    else:
        _patch(client, "Job", job, _end_request(how, activeDeadlineSeconds=_MIN_GRACE_SECONDS))


def _end_request(how: Literal["stop", "kill"], **spec: object) -> Object:
    return {"metadata": {"annotations": {END_REQUESTED: how}}, "spec": spec}


def _patch(client: KubernetesClient, kind: str, object_: Object, body: Object) -> None:
    try:
        client.patch(path_to(object_, kind), object_["metadata"]["uid"], body)
    except KubernetesRefusedError as error:
        # A patch with another object's UID is reported as an invalid change of the UID.
        if error.code not in _CHANGED and not (error.code == _INVALID and "metadata.uid" in error.message):
            raise


def _delete(client: KubernetesClient, kind: str, object_: Object, grace_seconds: int | None = None) -> None:
    try:
        client.delete(path_to(object_, kind), object_["metadata"]["uid"], grace_seconds)
    except KubernetesRefusedError as error:
        if error.code not in _CHANGED:
            raise


_TIMESTAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d) ?")
_NO_LOGS = frozenset((400, 404))
"""The container has not started, or the pod or its output is gone."""

Position = tuple[str, int]
"""Time of the last line that was read, and the number of lines read with that time."""


def read_logs(client: KubernetesClient, pods: Sequence[dict[str, Any]], cursor: str) -> LogPart:
    """Read new lines of each pod, about a megabyte at most, in the order in which the pods were created.

    An incomplete last line is returned once its pod has ended. Lines that the kubelet has rotated away are lost.
    """
    positions = _positions(cursor)
    data = b""
    for pod in in_order(pods):
        metadata = pod["metadata"]
        if not has_started(pod) or len(data) >= LARGEST_PART:
            continue
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/log"
        position = positions.get(metadata["uid"], ("", 0))
        query = {"container": container_of(pod), "timestamps": "true"}
        if position[0]:
            query["sinceTime"] = position[0]
        try:
            with client.stream(path, **query) as pieces:
                part, position = _new_lines(
                    pieces, position, LARGEST_PART - len(data), complete_only=is_live(pod)
                )
        except KubernetesRefusedError as error:
            if error.code not in _NO_LOGS:
                raise
            continue
        data += part
        if position[0]:
            positions[metadata["uid"]] = position
    existing = {str(pod["metadata"]["uid"]) for pod in pods}
    remaining = {uid: position for uid, position in positions.items() if uid in existing}
    return LogPart(data, json.dumps(remaining, separators=(",", ":")) if remaining else cursor)


def _new_lines(
    pieces: Iterable[bytes], position: Position, limit: int, *, complete_only: bool
) -> tuple[bytes, Position]:
    """Return the lines after a position. Lines are counted per time, because several may have the same time."""
    skipping = position[1]
    time = position[0]
    data = bytearray()
    for line in _lines(pieces):
        text = line
        if stamp := _TIMESTAMP.match(
            line
        ):  # without a timestamp, this is the rest of a line that the kubelet split
            text, time = line[stamp.end() :], stamp[0].decode().strip()
        if _key(time) < _key(position[0]):
            continue
        if time == position[0] and skipping:
            skipping -= 1
            continue
        if complete_only and not line.endswith(b"\n"):
            break
        data += text
        position = (time, position[1] + 1 if time == position[0] else 1)
        if len(data) >= limit:
            break
    return bytes(data), position


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest


def _key(time: str) -> tuple[str, str]:
    """Return a sort key for times of one zone, whose fractions differ in their number of digits."""
    stamp = _TIMESTAMP.match(time.encode())
    if stamp is None:
        return "", ""
    return stamp[1].decode(), (stamp[2] or b"").decode()


def _positions(cursor: str) -> dict[str, Position]:
    try:
        return {
            str(uid): (str(time), int(count)) for uid, (time, count) in json.loads(cursor or "{}").items()
        }
    except (ValueError, TypeError, AttributeError):
        return {}
