"""Slurm's commands with a deadline, their errors, and the rows of ``squeue -O`` and ``sacct -p``.

Names, comments and paths of jobs can hold any character, and belong to users. Each field therefore ends with a mark that is new for
each call, so that nobody can write the mark, nor a row of another job.
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


MARK = "watchstep"
"""The comment of jobs that launchers of Watchstep submitted."""

_FIELDS = (
    "JobID", "State", "SubmitTime", "RestartCnt", "exit_code", "Reason", "Cluster", "NodeList", "Comment",
    "Name", "StdOut", "UserID", "Account",
)  # fmt: skip
_ACCOUNTED = "JobIDRaw,State,ExitCode,Submit,Cluster,JobName"

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
"""States whose exit code is the program's, 0 included."""

_JOB = re.compile(r"[1-9][0-9]{0,9}(_[0-9]{1,9})?")


@dataclass(frozen=True)
class JobRow:
    """A job as it was started last, as Slurm knows it.

    Attributes:
        id: the number that is this job's alone, for a task of an array too.
        state: Slurm's word.
        submitted: when, in seconds since 1970. A requeue is a new submission.
        restarts: how often it was requeued.
        wait_status: as of wait(2): exit code times 256, plus the signal.
        reason: why it waits, or why it ended.
        cluster: its name.
        nodes: where it runs.
        comment: `MARK`, of ours.
        name: of the job.
        output: where its output goes.
        user: number of the user that it runs as; empty where it is not told.
        account: that it is charged to.
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
        """How it is."""
        reason = "" if self.reason in ("None", "(null)") else self.reason
        detail = " ".join(filter(None, (self.state, reason, self.nodes)))
        if self.state in _QUEUED:
            return JobStatus("queued", detail=detail)
        if self.state not in _OVER:
            return JobStatus("running", detail=detail)
        code = _exit_code(self.wait_status)
        known = self.state in _OWN_CODE or code != 0
        return JobStatus(_OVER[self.state], code if known else None, detail)


def is_job_id(text: str) -> bool:
    """Whether it can be the id of a job, or of a task of an array."""
    return _JOB.fullmatch(text) is not None


def held_in_memory(*selecting: str) -> list[JobRow]:
    """Jobs that the controller remembers: those that run or wait, and those that ended within its MinJobAge.

    Args:
        selecting: options of ``squeue``.

    Raises:
        BackendError: it could not be asked.
    """
    end = _new_end()
    fields = ",".join(f"{name}:{end}" for name in _FIELDS)
    try:
        said = run(("squeue", "--noheader", "--states=all", f"--Format={fields}", *selecting))
    except CommandFailedError as error:
        if "invalid job id" in error.said.lower():
            return []
        raise
    return [_row(fields) for fields in _rows(said, end)]


def has_steps(job_id: str) -> bool:
    """Whether anything of a job runs under ``srun``.

    Raises:
        BackendError: it could not be asked.
    """
    try:
        said = run(("squeue", "--steps", "--noheader", f"--jobs={job_id}", "--Format=StepID"))
    except CommandFailedError:
        return False
    return any(line.strip().partition(".")[2].isdecimal() for line in said.splitlines())


def accounted(*selecting: str) -> list[JobRow]:
    """Starts of jobs, oldest first, as accounting keeps them; none where there is no accounting.

    Args:
        selecting: options of ``sacct``.

    Raises:
        BackendError: it could not be asked.
    """
    end = _new_end()
    asked = (
        "--noheader",
        "--parsable",
        f"--delimiter={end}",
        "--allocations",
        "--duplicates",
        "--starttime=1970-01-01",
    )
    try:
        said = run(("sacct", *asked, f"--format={_ACCOUNTED}", *selecting))
    except CommandFailedError as error:
        if "accounting storage is disabled" in error.said.lower():
            return []
        raise
    return read_accounted(said, end)


def known(*selecting: str) -> list[JobRow]:
    """Jobs as they were started last: from the controller's memory or, where it remembers none of them, from accounting.

    Args:
        selecting: options that ``squeue`` and ``sacct`` both have.

    Raises:
        BackendError: one of them could not be asked.
    """
    return held_in_memory(*selecting) or list({row.id: row for row in accounted(*selecting)}.values())


def read_accounted(said: str, end: str) -> list[JobRow]:
    """The rows of ``sacct --parsable`` in this module's format.

    Args:
        said: what it wrote.
        end: what each field ends with.
    """
    rows = []
    for number, (job, state, code, submitted, cluster, name) in enumerate(_rows(said, end)):
        exited, _, signalled = code.partition(":")
        wait_status = int(exited) * 256 + int(signalled or 0)
        known = {"cluster": cluster, "name": name}
        # "CANCELLED by 1000" is one of its words. Rows of one job are its starts, in their order.
        rows.append(JobRow(job, state.split()[0], _seconds(submitted), number, wait_status, **known))
    return rows


def _new_end() -> str:
    return f"\x1f{secrets.token_hex(8)}\x1f"


def _rows(said: str, end: str) -> list[list[str]]:
    """Fields of each row."""
    return [row.split(end) for row in said.split(f"{end}\n") if row.strip()]


def _row(fields: list[str]) -> JobRow:
    job, state, submitted, restarts, code, *rest = fields
    return JobRow(job.strip(), state, _seconds(submitted), int(restarts), int(code), *rest[:8])


def _seconds(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _exit_code(wait_status: int) -> int:
    """Negative for a signal. ``srun`` exits with 128 and the signal's number where one ended the program."""
    if wait_status & 0x7F:
        return -(wait_status & 0x7F)
    code = wait_status >> 8
    return 128 - code if 128 < code <= 192 else code
