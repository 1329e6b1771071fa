"""Requests to Ray for a launch, and their validation."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from watchstep_launch.backend import Launch, SubmissionRejectedError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

MARK = "watchstep"
"""Metadata key of jobs that Watchstep submitted; the value is unique to the submission."""

_NAME = re.compile(r"[a-z0-9-]{1,63}")


def request_of(
    launch: Launch, runtime_env: Mapping[str, Any], resources: Mapping[str, Any], stop_seconds: int
) -> dict[str, Any]:
    """Return the arguments of `RayClient.submit`. Each request has its own mark and a submission id.

    Args:
        launch: what to start.
        runtime_env: Ray's runtime environment, to which the launch's variables are added.
        resources: resources reserved for the entrypoint; None values are omitted.
        stop_seconds: seconds between SIGTERM and SIGKILL.

    Raises:
        SubmissionRejectedError: the launch's name, or the variables of the runtime environment, are invalid.
    """
    environment = dict(runtime_env)
    variables = environment.get("env_vars") or {}
    if not isinstance(variables, Mapping):
        raise SubmissionRejectedError(
            f"runtime_env: env_vars is {str(variables)[:80]!r}",
            "use names and values: {'env_vars': {'SEED': '7'}}",
        )
    environment["env_vars"] = {
        "RAY_JOB_STOP_WAIT_TIME_S": str(stop_seconds),
        **{str(name): str(value) for name, value in variables.items()},
        **launch.environment,
        **launch.secrets,
    }
    # Ray runs an entrypoint in a shell.
    command = f"exec {shlex.join(launch.command)}"
    if "working_dir" not in environment:
        command = f"cd {shlex.quote(str(launch.folder))} && {command}"
    if launch.log is not None:
        command = f"exec >>{shlex.quote(str(launch.log))} 2>&1; {command}"
    return {
        "entrypoint": command,
        "submission_id": _id_of(launch),
        "runtime_env": environment,
        "metadata": {MARK: secrets.token_hex(8)},
        **{name: value for name, value in resources.items() if value is not None},
    }


def _id_of(launch: Launch) -> str:
    """Return a submission id. Ray keeps even what it refuses: an id with a slash stays in its list, and nothing can remove it."""
    if not launch.name:
        return f"ws-{secrets.token_hex(8)}"
    if _NAME.fullmatch(launch.name) is None:
        raise SubmissionRejectedError(
            f"{launch.name[:80]!r} is not a valid job name for Ray",
            "use 1 to 63 characters of a-z, 0-9 and '-'",
        )
    return launch.name


def is_submission(details: JobDetails, request: Mapping[str, Any]) -> bool:
    """Whether a job results from exactly this submission."""
    return bool((details.metadata or {}).get(MARK) == request["metadata"][MARK])


def never_started(details: JobDetails) -> bool:
    """Whether Ray has given up on a job before anything of it ran."""
    return bool(
        details.status.value == "FAILED"
        and details.driver_exit_code is None
        and details.driver_node_id is None
    )


def last_message_line(text: str) -> str:
    """Return the last line that contains a word, which in a traceback is the reason; empty if there is none."""
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    return lines[-1][:500] if lines else ""
