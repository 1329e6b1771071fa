"""How a job is, read from its object and its pods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from watchstep_launch.backend import JobState, JobStatus
from watchstep_launch.backends.kubernetes.manifest import CONTAINER

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
