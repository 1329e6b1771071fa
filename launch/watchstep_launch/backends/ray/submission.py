"""What Ray is asked for a launch, and what cannot be asked of it."""

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
"""Key in the metadata of jobs that launchers of Watchstep submitted; the value is the submission's own."""

_NAME = re.compile(r"[a-z0-9-]{1,63}")


def request_of(
    launch: Launch, runtime_env: Mapping[str, Any], kept: Mapping[str, Any], stop_seconds: int
) -> dict[str, Any]:
    """What `RayClient.submit` takes. No two have the same mark, and none is without a submission id.

    Args:
        launch: what to start.
        runtime_env: Ray's, to which the launch's variables are added.
        kept: what is kept for the entrypoint; what is None is left out.
        stop_seconds: between SIGTERM and SIGKILL.

    Raises:
        SubmissionRejectedError: its name, or the variables of the runtime environment, cannot be used.
    """
    environment = dict(runtime_env)
    given = environment.get("env_vars") or {}
    if not isinstance(given, Mapping):
        raise SubmissionRejectedError(
            f"runtime_env: env_vars is {str(given)[:80]!r}",
            "give names and values: {'env_vars': {'SEED': '7'}}",
        )
    environment["env_vars"] = {
        "RAY_JOB_STOP_WAIT_TIME_S": str(stop_seconds),
        **{str(name): str(value) for name, value in given.items()},
        **launch.environment,
        **launch.secrets,
    }
    # Ray gives an entrypoint to a shell.
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
        **{name: value for name, value in kept.items() if value is not None},
    }


def _id_of(launch: Launch) -> str:
    """A submission id. Ray itself keeps what it refuses: an id with a slash stays in its list, and nothing can remove it."""
    if not launch.name:
        return f"ws-{secrets.token_hex(8)}"
    if _NAME.fullmatch(launch.name) is None:
        raise SubmissionRejectedError(
            f"name {launch.name[:80]!r}: cannot be a job's", "name it by 1 to 63 of a-z, 0-9 and '-'"
        )
    return launch.name


def is_of(found: JobDetails, asked: Mapping[str, Any]) -> bool:
    """Whether a job came of this very submission."""
    return bool((found.metadata or {}).get(MARK) == asked["metadata"][MARK])


def never_began(found: JobDetails) -> bool:
    """Whether Ray has given a job up before anything of it ran."""
    return bool(
        found.status.value == "FAILED" and found.driver_exit_code is None and found.driver_node_id is None
    )


def reason_in(said: str) -> str:
    """The line that says why: of a traceback, the last in which there is a word; empty where there is none."""
    lines = [line.strip() for line in said.splitlines() if any(map(str.isalnum, line))]
    return lines[-1][:500] if lines else ""
