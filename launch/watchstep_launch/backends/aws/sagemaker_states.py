"""What SageMaker says of a training job, as states and exit codes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from watchstep_launch.backend import JobState, JobStatus
from watchstep_launch.backends.aws.forms import of_container

_WAITING = frozenset(("Starting", "Pending", "LaunchingMLInstances"))
_OUT_OF_TIME = frozenset(("MaxRuntimeExceeded", "MaxWaitTimeExceeded"))
_RAN = frozenset(("Training", "Uploading", "Interrupted", "Restarting"))

_LAST_CODE = re.compile(r"exit code:?\s*(-?\d{1,9})\s*$", re.IGNORECASE)
_SOME_CODE = re.compile(r"exit\s?code:?\s*(-?\d{1,9})", re.IGNORECASE)
_MOST_REASON = 500


def status_of(found: Mapping[str, Any]) -> JobStatus:
    """How a job is, by what DescribeTrainingJob answers."""
    held, second = str(found["TrainingJobStatus"]), str(found.get("SecondaryStatus", ""))
    reason = " ".join(str(found.get("FailureReason", "")).split())
    detail = f"{second or held}: {reason[:_MOST_REASON]}" if reason else second or held
    if held == "Completed":
        return JobStatus("ended", 0, detail)
    if held == "Failed":
        return JobStatus("ended", exit_code(reason), detail)
    if held == "Stopped":
        # Nobody asked for these stops: as with a time limit elsewhere, the job is over by itself.
        return JobStatus("ended" if second in _OUT_OF_TIME else "cancelled", None, detail)
    if held == "InProgress":
        return JobStatus(_in_progress(found, second), None, detail)
    return JobStatus({"Stopping": "running", "Deleting": "vanished"}.get(held, "unknown"), None, detail)  # type: ignore[arg-type]


def exit_code(reason: str) -> int | None:
    """The exit code that a failure's reason names; negative for a signal; None where it names none.

    SageMaker has no field for it. What the container ended by stands last, ``…, exit code: 1``; its toolkit's
    ``ExitCode 1`` stands first.
    """
    found = _LAST_CODE.search(reason) or _SOME_CODE.search(reason)
    return None if found is None else of_container(int(found[1]))


def _in_progress(found: Mapping[str, Any], second: str) -> JobState:
    if second not in _WAITING:
        return "running"
    ran = any(one.get("Status") in _RAN for one in found.get("SecondaryStatusTransitions", []))
    return "running" if ran else "queued"
