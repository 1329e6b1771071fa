"""The states of Kubernetes jobs and pods, ending them, and their logs.

A deleted pod takes its output and its exit code with it. A stop therefore gives each pod of a Job a deadline in the past: the kubelet
sends SIGTERM, and SIGKILL after the pod's grace time, and the pod stays as failed. A Job without a running program gets a deadline
itself. A TrainJob has neither: it is suspended, which deletes its pods, SIGTERM first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from watchstep_launch.backend import LARGEST_PART, JobState, JobStatus, LogPart
from watchstep_launch.backends.kubernetes.identity import KubernetesRefusedError, Resource
from watchstep_launch.backends.kubernetes.manifest import CONTAINER
from watchstep_launch.backends.kubernetes.submission import path_to

if TYPE_CHECKING:
    from watchstep_launch.backends.kubernetes.client import KubernetesClient


ASKED = "watchstep.end"
"""Annotation of a job that was asked to end: ``stop`` or ``kill``."""

_INDEX = "batch.kubernetes.io/job-completion-index"
_LONGEST_DETAIL = 300

Object = dict[str, Any]


def status_of(job: Object, pods: Sequence[Object]) -> JobStatus:
    """How a Job or TrainJob is, with all pods of its own that the cluster still has.

    It is over when it says so, and none of them runs any more.
    """
    ended = condition(job, "Complete", "Failed")
    asked = job["metadata"].get("annotations", {}).get(ASKED, "")
    if ended is None and asked and _is_suspended(job):
        ended = condition(job, "Suspended")
    if ended is None or any(is_running(pod) for pod in pods):
        state: JobState = "running" if any(has_started(pod) for pod in pods) or ended else "queued"
        return JobStatus(state, detail=_shortened(_how_it_goes(job, pods)))
    detail = _shortened(_words_of(ended))
    if ended["type"] == "Complete":
        return JobStatus("ended", 0, detail)
    return JobStatus("cancelled" if asked else "ended", _exit_code(pods), detail)


def condition(job: Object, *types: str) -> Object | None:
    """The first of an object's conditions that is of one of these types and holds."""
    held = job.get("status", {}).get("conditions") or ()
    return next((one for one in held if one["type"] in types and one["status"] == "True"), None)


def is_live(pod: Object) -> bool:
    """Whether it runs or may still do so."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def is_running(pod: Object) -> bool:
    """Whether its program runs, as far as the cluster knows."""
    return is_live(pod) and has_started(pod)


def has_started(pod: Object) -> bool:
    """Whether a program of it runs, or has run."""
    status = pod.get("status", {})
    return status.get("phase") in ("Running", "Succeeded", "Failed", "Unknown") or any(
        "running" in one.get("state", {}) or "terminated" in one.get("state", {}) for one in _containers(pod)
    )


def in_order(pods: Iterable[Object]) -> list[Object]:
    """Pods as they were made, those of one moment by their names."""
    return sorted(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))


def container_of(pod: Object) -> str:
    """The container that runs the program: ours, or the first."""
    names = [str(one["name"]) for one in pod["spec"]["containers"]]
    return CONTAINER if CONTAINER in names else names[0]


def _is_suspended(job: Object) -> bool:
    return bool(job["spec"].get("suspend")) and condition(job, "Suspended") is not None


def _exit_code(pods: Sequence[Object]) -> int | None:
    """Of the last start of each worker, the first code that is not 0."""
    last: dict[tuple[str, str], Object] = {}
    for pod in in_order(pods):
        owner = next((one["uid"] for one in pod["metadata"].get("ownerReferences") or ()), "")
        last[owner, pod["metadata"].get("annotations", {}).get(_INDEX, "")] = pod
    found = [code for pod in last.values() if (code := _code_of(pod)) is not None]
    return next((code for code in found if code), 0 if found else None)


def _code_of(pod: Object) -> int | None:
    name = container_of(pod)
    for one in _containers(pod):
        if one["name"] == name and "terminated" in one.get("state", {}):
            code = int(one["state"]["terminated"]["exitCode"])
            # As shells and container runtimes tell of a signal.
            return 128 - code if 128 < code <= 192 else code
    return None


def _containers(pod: Object) -> list[Object]:
    return list(pod.get("status", {}).get("containerStatuses") or ())


def _how_it_goes(job: Object, pods: Sequence[Object]) -> str:
    live = [pod for pod in in_order(pods) if is_live(pod)]
    if live:
        return "; ".join(dict.fromkeys(filter(None, map(_how_a_pod_is, live))))
    if job["spec"].get("suspend"):
        return "suspended: waits to be admitted"
    return "waits to be started again" if pods else "no pod of it is there yet"


def _how_a_pod_is(pod: Object) -> str:
    status = pod.get("status", {})
    if "deletionTimestamp" in pod["metadata"]:
        return "is being ended"
    for one in (*(status.get("initContainerStatuses") or ()), *_containers(pod)):
        waiting = one.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in ("ContainerCreating", "PodInitializing"):
            return _words_of(waiting)
    unscheduled = next(
        (
            one
            for one in status.get("conditions") or ()
            if one["type"] == "PodScheduled" and one["status"] == "False"
        ),
        None,
    )
    if unscheduled is not None:
        return _words_of(unscheduled)
    node = pod["spec"].get("nodeName", "")
    return f"{status.get('phase', 'Pending')}{' on ' if node else ''}{node}"


def _words_of(said: Object) -> str:
    reason, message = str(said.get("reason", "") or said.get("type", "")), str(said.get("message", ""))
    return f"{reason}: {message}" if message else reason


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_DETAIL else f"{line[: _LONGEST_DETAIL - 1]}…"


_AT_ONCE = 1
"""Seconds; the least that a deadline can be. A pod is deleted with so much grace, not with none: the API would forget at once
one with none, though its program may still run."""

_OVERTAKEN = frozenset((404, 409))
"""It is gone, or another has its name, or it changed meanwhile: how it is then says the rest."""

_INVALID = 422


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


_STAMPED = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d) ?")
_NOTHING_KEPT = frozenset((400, 404))
"""The container has not begun, or the pod, or its output, is gone."""

Place = tuple[str, int]
"""Time of the last line that was given, and how many of that time were."""


def read_logs(client: KubernetesClient, pods: Sequence[dict[str, Any]], cursor: str) -> LogPart:
    """New lines of each pod, a megabyte or so at most, the pods in the order in which they were made.

    A line that is not ended is given once its pod has. A kubelet keeps what it has not rotated away: the rest is lost.
    """
    places = _places(cursor)
    data = b""
    for pod in in_order(pods):
        metadata = pod["metadata"]
        if not has_started(pod) or len(data) >= LARGEST_PART:
            continue
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/log"
        place = places.get(metadata["uid"], ("", 0))
        query = {"container": container_of(pod), "timestamps": "true"}
        if place[0]:
            query["sinceTime"] = place[0]
        try:
            with client.stream(path, **query) as pieces:
                part, place = _new_lines(pieces, place, LARGEST_PART - len(data), complete_only=is_live(pod))
        except KubernetesRefusedError as error:
            if error.code not in _NOTHING_KEPT:
                raise
            continue
        data += part
        if place[0]:
            places[metadata["uid"]] = place
    held = {str(pod["metadata"]["uid"]) for pod in pods}
    kept = {uid: place for uid, place in places.items() if uid in held}
    return LogPart(data, json.dumps(kept, separators=(",", ":")) if kept else cursor)


def _new_lines(
    pieces: Iterable[bytes], place: Place, largest: int, *, complete_only: bool
) -> tuple[bytes, Place]:
    """What comes behind a place. Lines of the same time are counted: two may have it."""
    skipping = place[1]
    time = place[0]
    data = bytearray()
    for line in _lines(pieces):
        text = line
        if stamp := _STAMPED.match(line):  # without one it is the rest of a line that the kubelet cut
            text, time = line[stamp.end() :], stamp[0].decode().strip()
        if _key(time) < _key(place[0]):
            continue
        if time == place[0] and skipping:
            skipping -= 1
            continue
        if complete_only and not line.endswith(b"\n"):
            break
        data += text
        place = (time, place[1] + 1 if time == place[0] else 1)
        if len(data) >= largest:
            break
    return bytes(data), place


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest


def _key(time: str) -> tuple[str, str]:
    """Orders times of one zone: fractions have as many digits as they need."""
    stamp = _STAMPED.match(time.encode())
    if stamp is None:
        return "", ""
    return stamp[1].decode(), (stamp[2] or b"").decode()


def _places(cursor: str) -> dict[str, Place]:
    try:
        return {
            str(uid): (str(time), int(count)) for uid, (time, count) in json.loads(cursor or "{}").items()
        }
    except (ValueError, TypeError, AttributeError):
        return {}
