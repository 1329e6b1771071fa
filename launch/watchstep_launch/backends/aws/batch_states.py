"""What AWS Batch says of a job, as states and exit codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from watchstep_launch.backend import JobState, JobStatus
from watchstep_launch.backends.aws.forms import of_container

_STATES: dict[str, JobState] = {
    "SUBMITTED": "queued",
    "PENDING": "queued",
    "RUNNABLE": "queued",
    "STARTING": "running",
    "RUNNING": "running",
    "SUCCEEDED": "ended",
    "FAILED": "ended",
}
ACTIVE = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
"""Statuses of jobs that are not over."""


def status_of(found: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]] = ()) -> JobStatus:
    """How a job is, by what DescribeJobs answers of it, and of its nodes where it has several."""
    held = str(found["status"])
    state = _STATES.get(held, "unknown")
    why = " ".join(str(found.get("statusReason") or _last_container(found).get("reason") or "").split())[:500]
    detail = f"{held}: {why}" if why else held
    if state != "ended":
        return JobStatus(state, None, detail)
    codes = [code for one in (found, *nodes) if (code := _exit_code(one)) is not None]
    code = next((code for code in codes if code), 0 if held == "SUCCEEDED" else None)
    if held == "FAILED" and (found.get("isTerminated") or found.get("isCancelled")):
        return JobStatus("cancelled", code, detail)
    return JobStatus("ended", code, detail)


def streams_of(found: Mapping[str, Any]) -> Iterator[str]:
    """The log streams of a job's attempts, oldest first."""
    containers = [one.get("container") or {} for one in found.get("attempts", [])]
    named = [str(one.get("logStreamName") or "") for one in (*containers, found.get("container") or {})]
    yield from dict.fromkeys(filter(None, named))


def _exit_code(found: Mapping[str, Any]) -> int | None:
    code = _last_container(found).get("exitCode")
    return None if code is None else of_container(int(code))


def _last_container(found: Mapping[str, Any]) -> Mapping[str, Any]:
    now: Mapping[str, Any] = found.get("container") or {}
    if "exitCode" in now or not found.get("attempts"):
        return now
    return found["attempts"][-1].get("container") or now
