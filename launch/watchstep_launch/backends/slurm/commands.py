"""Running Slurm's commands with a deadline, their errors, and parsing rows of ``squeue -O`` and ``sacct -p``.

Names, comments and paths of jobs can contain any character, and belong to users. Each field therefore ends with a delimiter that is
random for each call, so that no user can forge the delimiter or a row of another job.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from watchstep_launch.backend import (
    BackendDownError,
    BackendError,
    CredentialsExpiredError,
    JobState,
    JobStatus,
)

SECONDS = 25.0
"""Timeout of a command. If no controller can be found, the commands of Slurm 22.05 give up by themselves after 9 or 18 s."""

SILENT = "no output"
"""Output that is reported for a command that failed without output."""

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
    """A Slurm command failed for a reason that its caller may handle; ``output`` is what it wrote."""

    def __init__(self, what: str, hint: str, output: str) -> None:
        super().__init__(what, hint)
        self.output = output


def run(command: Sequence[str], text: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Return a Slurm command's output; times in it are seconds since 1970.

    Args:
        command: name of the command, found on PATH, and its arguments.
        text: standard input.
        environment: variables added to this process's.

    Raises:
        BackendDownError: the command is not installed, the controller does not answer, or the command takes longer than `SECONDS`.
        CredentialsExpiredError: the cluster refuses this user.
        CommandFailedError: the command failed for another reason.
    """
    name = command[0]
    path = shutil.which(name)
    if path is None:
        raise BackendDownError(f"{name}: not found on PATH", "run this where Slurm's commands are installed")
    try:
        completed = subprocess.run(  # noqa: S603 - Slurm's own commands, with arguments that were checked
            [path, *command[1:]],
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
            f"{name}: no answer for {SECONDS:g} s", "check whether slurmctld answers: scontrol ping"
        ) from None
    except (OSError, ValueError) as error:
        raise BackendError(f"{name}: cannot be run ({error})", "check its arguments and its file") from error
    if completed.returncode == 0:
        return completed.stdout
    raise _error(name, completed.stderr.strip() or f"{SILENT}, exit code {completed.returncode}")


def _inherited() -> dict[str, str]:
    """Return this process's variables, without those of a Slurm job that it is part of: they would affect the new job."""
    inside = "SLURM_JOB_ID" in os.environ
    allowed = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {
        name: value
        for name, value in os.environ.items()
        if not inside or name in allowed or not name.startswith(("SLURM_", "SLURMD_", "SRUN_", "PMI"))
    }


def _error(name: str, output: str) -> BackendError:
    lowered = output.lower()
    reason = output.splitlines()[-1]
    if any(sign in lowered for sign in _REFUSED):
        return CredentialsExpiredError(
            f"{name}: refused ({reason})",
            "check that munged runs here with the cluster's key, and that this user has permission",
        )
    if any(sign in lowered for sign in _DOWN):
        return BackendDownError(
            f"{name}: the cluster does not answer ({reason})",
            "check whether slurmctld answers: scontrol ping",
        )
    return CommandFailedError(f"{name}: {reason}", "correct the cause that Slurm reports", output)


MARK = "watchstep"
"""Comment of jobs that Watchstep submitted."""

_FIELDS = (
    "JobID", "State", "SubmitTime", "RestartCnt", "exit_code", "Reason", "Cluster", "NodeList", "Comment",
    "Name", "StdOut", "UserID", "Account",
)  # fmt: skip
_ACCOUNTING_FIELDS = "JobIDRaw,State,ExitCode,Submit,Cluster,JobName"

_QUEUED = frozenset(
    ("CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
)
_OVER: dict[str, JobState] = {
    "BOOT_FAIL": "ended",
    "CANCELLED": "cancelled",
    "COMPLETED": "ended",
    "DEADLINE": "cancelled",
    "FAILED": "ended",
    "LAUNCH_FAILED": "ended",
    "NODE_FAIL": "ended",
    "OUT_OF_MEMORY": "ended",
    "PREEMPTED": "cancelled",
    "REVOKED": "vanished",
    "TIMEOUT": "ended",
}
_OWN_CODE = ("COMPLETED", "FAILED")
"""States with the program's own exit code, 0 included."""

_JOB = re.compile(r"[1-9][0-9]{0,9}(_[0-9]{1,9})?")


@dataclass(frozen=True)
class JobRow:
    """A job in its last start, as Slurm reports it.

    Attributes:
        id: unique number of the job, also for a task of an array.
        state: Slurm's name of the state.
        submitted: time of submission in seconds since 1970. A requeue is a new submission.
        restarts: how often the job was requeued.
        wait_status: as of wait(2): exit code times 256, plus the signal.
        reason: why it waits, or why it ended.
        cluster: name of the cluster.
        nodes: the job's nodes.
        comment: `MARK` for jobs of Watchstep.
        name: the job's name.
        output: file for its output.
        user: numeric id of the user that it runs as; empty if unknown.
        account: the account that it is charged to.
    """

    id: str
    state: str
    submitted: int
    restarts: int
    wait_status: int
    reason: str = ""
    cluster: str = ""
    nodes: str = ""
    comment: str = ""
    name: str = ""
    output: str = ""
    user: str = ""
    account: str = ""

    @property
    def status(self) -> JobStatus:
        """The job's status."""
        reason = "" if self.reason in ("None", "(null)") else self.reason
        detail = " ".join(filter(None, (self.state, reason, self.nodes)))
        if self.state in _QUEUED:
            return JobStatus("queued", detail=detail)
        if self.state not in _OVER:
            return JobStatus("running", detail=detail)
        code = _exit_code(self.wait_status)
        is_known = self.state in _OWN_CODE or code != 0
        return JobStatus(_OVER[self.state], code if is_known else None, detail)


def is_job_id(text: str) -> bool:
    """Whether a text has the form of a job's id, or of an array task's."""
    return _JOB.fullmatch(text) is not None


def controller_rows(*options: str) -> list[JobRow]:
    """Return jobs that the controller remembers: those that run or wait, and those that ended within its MinJobAge.

    Args:
        options: options of ``squeue`` that select jobs.

    Raises:
        BackendError: ``squeue`` failed.
    """
    delimiter = _new_delimiter()
    fields = ",".join(f"{name}:{delimiter}" for name in _FIELDS)
    try:
        output = run(("squeue", "--noheader", "--states=all", f"--Format={fields}", *options))
    except CommandFailedError as error:
        if "invalid job id" in error.output.lower():
            return []
        raise
    return [_row(fields) for fields in _rows(output, delimiter)]


def has_steps(job_id: str) -> bool:
    """Whether a job has steps, started by ``srun``.

    Raises:
        BackendError: ``squeue`` failed.
    """
    try:
        output = run(("squeue", "--steps", "--noheader", f"--jobs={job_id}", "--Format=StepID"))
    except CommandFailedError:
        return False
    return any(line.strip().partition(".")[2].isdecimal() for line in output.splitlines())


def accounting_rows(*options: str) -> list[JobRow]:
    """Return starts of jobs from accounting, oldest first; empty if there is no accounting.

    Args:
        options: options of ``sacct`` that select jobs.

    Raises:
        BackendError: ``sacct`` failed.
    """
    delimiter = _new_delimiter()
    arguments = (
        "--noheader",
        "--parsable",
        f"--delimiter={delimiter}",
        "--allocations",
        "--duplicates",
        "--starttime=1970-01-01",
    )
    try:
        output = run(("sacct", *arguments, f"--format={_ACCOUNTING_FIELDS}", *options))
    except CommandFailedError as error:
        if "accounting storage is disabled" in error.output.lower():
            return []
        raise
    return parse_accounting(output, delimiter)


def last_rows(*options: str) -> list[JobRow]:
    """Return jobs in their last start: from the controller's memory, or from accounting if it remembers none of them.

    Args:
        options: options that ``squeue`` and ``sacct`` have in common.

    Raises:
        BackendError: a command failed.
    """
    return controller_rows(*options) or list({row.id: row for row in accounting_rows(*options)}.values())


def parse_accounting(output: str, delimiter: str) -> list[JobRow]:
    """Parse the output of ``sacct --parsable`` with this module's fields.

    Args:
        output: the output.
        delimiter: the end of each field.
    """
    rows = []
    for number, (job, state, code, submitted, cluster, name) in enumerate(_rows(output, delimiter)):
        exited, _, signalled = code.partition(":")
        wait_status = int(exited) * 256 + int(signalled or 0)
        fields = {"cluster": cluster, "name": name}
        # The state may be "CANCELLED by 1000". Rows of one job are its starts, in order.
        rows.append(JobRow(job, state.split()[0], _seconds(submitted), number, wait_status, **fields))
    return rows


def _new_delimiter() -> str:
    return f"\x1f{secrets.token_hex(8)}\x1f"


def _rows(output: str, delimiter: str) -> list[list[str]]:
    """Split output into the fields of each row."""
    return [row.split(delimiter) for row in output.split(f"{delimiter}\n") if row.strip()]


def _row(fields: list[str]) -> JobRow:
    job, state, submitted, restarts, code, *rest = fields
    return JobRow(job.strip(), state, _seconds(submitted), int(restarts), int(code), *rest[:8])


def _seconds(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _exit_code(wait_status: int) -> int:
    """Return an exit code; negative for a signal. ``srun`` exits with 128 plus the signal's number if one ended the program."""
    if wait_status & 0x7F:
        return -(wait_status & 0x7F)
    code = wait_status >> 8
    return 128 - code if 128 < code <= 192 else code
