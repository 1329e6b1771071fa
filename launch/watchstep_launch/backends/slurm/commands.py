"""Slurm's own commands: run with a deadline, and their complaints told apart by what to do about them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from watchstep_launch.errors import BackendDownError, BackendError, CredentialsExpiredError

SECONDS = 25.0
"""How long a command may take. With no controller to be found, Slurm 22.05's give up after 9 or 18 s by themselves."""

SILENT = "without a word"
"""What is told of a command that failed and wrote nothing."""

_DOWN = (
    "unable to contact slurm controller",
    "connection refused",
    "connect failure",
    "connection timed out",
    "socket timed out",
    "communication connection failure",
    "transport endpoint is not connected",
    "zero bytes were transmitted",
    "unexpected message received",
    "in standby mode",
    "temporarily unable",
    "resource temporarily unavailable",
    "address already in use",
    "rate limit exceeded",
)
_REFUSED = (
    "protocol authentication error",
    "munge encode failed",
    "munge decode failed",
    "invalid authentication credential",
    "access/permission denied",
    "user not authorized",
    "not permitted",
)


class CommandFailedError(BackendError):
    """A command of Slurm's said no, for a reason that its caller may know: ``said`` is what it wrote."""

    def __init__(self, what: str, hint: str, said: str) -> None:
        super().__init__(what, hint)
        self.said = said


def run(command: Sequence[str], text: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What a command of Slurm's writes; times are seconds since 1970.

    Args:
        command: its name, found on PATH, and its arguments.
        text: its input.
        environment: variables added to this process's.

    Raises:
        BackendDownError: it is not installed, the controller does not answer, or nothing came for `SECONDS`.
        CredentialsExpiredError: the cluster refuses this user.
        CommandFailedError: it failed for another reason.
    """
    name = command[0]
    place = shutil.which(name)
    if place is None:
        raise BackendDownError(f"{name}: not found on PATH", "run this where Slurm's commands are installed")
    try:
        done = subprocess.run(  # noqa: S603 - Slurm's own commands, with arguments that were checked
            [place, *command[1:]],
            input=text or "",
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**_inherited(), **(environment or {}), "SLURM_TIME_FORMAT": "%s"},
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BackendDownError(
            f"{name}: no answer for {SECONDS:g} s", "see whether slurmctld answers: scontrol ping"
        ) from None
    except (OSError, ValueError) as error:
        raise BackendError(
            f"{name}: cannot be run ({error})", "see to its arguments and to what it is"
        ) from error
    if done.returncode == 0:
        return done.stdout
    raise _error(name, done.stderr.strip() or f"{SILENT}, exit code {done.returncode}")


def _inherited() -> dict[str, str]:
    """This process's variables, without those of a job that it is itself a part of: they would shape the new one."""
    inside = "SLURM_JOB_ID" in os.environ
    ours = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {
        name: value
        for name, value in os.environ.items()
        if not inside or name in ours or not name.startswith(("SLURM_", "SLURMD_", "SRUN_", "PMI"))
    }


def _error(name: str, said: str) -> BackendError:
    low = said.lower()
    reason = said.splitlines()[-1]
    if any(sign in low for sign in _REFUSED):
        return CredentialsExpiredError(
            f"{name}: refused ({reason})",
            "see that munged runs here with the cluster's key, and that this user may do this",
        )
    if any(sign in low for sign in _DOWN):
        return BackendDownError(
            f"{name}: the cluster does not answer ({reason})", "see whether slurmctld answers: scontrol ping"
        )
    return CommandFailedError(f"{name}: {reason}", "see Slurm's reason", said)
