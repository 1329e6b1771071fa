"""Slurm backend: submits batch scripts, and queries and stops jobs with Slurm's commands. See ``docs/launch/slurm.md``."""

from __future__ import annotations

import getpass
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from watchstep.errors import ConfigError
from watchstep_launch.backend import (
    BackendDownError,
    BackendError,
    BackendModel,
    CredentialsExpiredError,
    JobHandle,
    JobNotFoundError,
    JobStatus,
    Launch,
    LogPart,
    SubmissionRejectedError,
    read_part,
)
from watchstep_launch.backends.slurm import commands
from watchstep_launch.backends.slurm.commands import MARK, SILENT, CommandFailedError, JobRow, run
from watchstep_launch.backends.slurm.identity import SlurmIdentity, check_may_stop

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_HEAD = """\
#!/bin/bash
# Written by Watchstep.
asked=
trap 'asked=1' TERM
"""

_FOR_ALL = """\
export WATCHSTEP_RESTARTS="${SLURM_RESTART_COUNT:-0}"
# srun takes these from its own variables, not from the job's.
unset SLURM_EXPORT_ENV
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
"""

_RANKS = """\
export MASTER_ADDR="${MASTER_ADDR:-$(hostname)}"
if [ -z "${MASTER_PORT:-}" ]; then
    # Below the kernel's ephemeral ports, and not in use.
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
    while (exec 3<>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done
    export MASTER_PORT
fi
"""

_WAIT_SECONDS = 300
"""How long other tasks may continue once the first has ended: they may wait for it forever, or save a checkpoint."""

_TASK_RANKS = (
    "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={local}; "
)
_AGENT = "export PET_NNODES=$SLURM_NTASKS PET_NODE_RANK=$SLURM_PROCID PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=$MASTER_PORT; "

_TAIL = """\
[ -z "$asked" ] || exit 143
{command}
code=$?
exit "$code"
"""


def batch_script(launch: Launch, tasks: int, tasks_per_node: int) -> str:
    """Return the batch script. Arguments and values reach the command unchanged.

    With several tasks, each gets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` for ``torch.distributed``; with one task per node, ``torchrun`` gets its nodes from the same values.
    ``MASTER_ADDR`` is the first node's hostname. The port is derived from the job's id and free on that node. Values in the
    environment take precedence.

    Raises:
        ConfigError: an argument or a variable contains a zero byte, or a variable's name is invalid.
    """
    parts = [_HEAD, _exports(launch.environment), _FOR_ALL]
    ranks = ""
    if tasks > 1:
        parts.append(_RANKS)
        ranks = _TASK_RANKS.format(local=tasks_per_node) + (_AGENT if tasks_per_node == 1 else "")
    task = ("bash", "-c", f'{ranks}exec "$@"', "watchstep-task", *launch.command)
    for text in launch.command:
        _check("an argument", text)
    wait_option = (f"--wait={_WAIT_SECONDS}",) if tasks > 1 else ()
    srun = ("srun", "--input=none", "--export=ALL", *wait_option, *task)
    parts.append(_TAIL.format(command=shlex.join(srun)))
    return "".join(parts)


def check_environment(environment: Mapping[str, str]) -> None:
    """Check that each variable can be set in a job.

    Raises:
        ConfigError: a name or a value is invalid.
    """
    for name, value in environment.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"environment variable {name!r} has an invalid name for Slurm", "use letters, digits and '_'"
            )
        _check(f"environment variable {name}", value)


def _exports(environment: Mapping[str, str]) -> str:
    check_environment(environment)
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def _check(name: str, text: str) -> None:
    if "\0" in text:
        raise ConfigError(f"{name} contains a zero byte: {text[:80]!r}", "remove it")


NAME = "slurm"
_ATTEMPTS = 3

Word = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f][^\x00-\x1f]*$", max_length=200)]
OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=40)]


class Slurm(BackendModel):
    """Submits with ``sbatch``, queries with ``squeue`` and ``sacct``, stops with ``scancel``.

    The machine's configuration determines the cluster: ``/etc/slurm/slurm.conf``, or ``SLURM_CONF``. A job that Slurm
    requeues stays the same job.

    ``scancel`` identifies a job by its id alone. Slurm reuses an id only after it has counted through millions of
    others, or after its state was wiped. If that happened in the milliseconds between query and signal, the signal
    would reach the other job.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 5.0
    shares_files: ClassVar[bool] = True
    submission_seconds: ClassVar[float] = 60.0  # sbatch outlives its launcher, but gives up much earlier

    partition: Word | None = Field(None, description="Partition to run in; by default the cluster's own.")
    nodes: int = Field(1, ge=1, description="Number of nodes.")
    tasks_per_node: int = Field(1, ge=1, description="How often the command is started on each node.")
    cpus_per_task: int | None = Field(None, ge=1, description="CPUs per task.")
    gpus_per_node: int | None = Field(None, ge=1, description="GPUs on each node.")
    memory: Word | None = Field(None, description="Memory of each node, in the format of --mem: 64G.")
    time: Word | None = Field(None, description="Time limit, in the format of --time: 12:00:00, 2-00.")
    account: Word | None = Field(None, description="Account that the job is charged to.")
    qos: Word | None = Field(None, description="Quality of service.")
    constraint: Word | None = Field(None, description="Features that the nodes must have.")
    requeue: bool = Field(
        True, description="Whether Slurm may start the job again after preemption or a node failure."
    )
    extra: Mapping[OptionName, Word | None] = Field(
        default_factory=dict,
        description="Other long options of sbatch: {'reservation': 'week', 'exclusive': None}.",
    )

    def submit(self, launch: Launch) -> JobHandle:
        """Submit a batch script that starts the command under ``srun``, once for each task.

        The job also inherits the launcher's environment, as usual with Slurm.

        Raises:
            SubmissionRejectedError: sbatch refused the job; the message includes the reason.
        """
        try:
            script = batch_script(launch, self.nodes * self.tasks_per_node, self.tasks_per_node)
            check_environment(launch.secrets)
        except ConfigError as error:
            raise SubmissionRejectedError(error.what, error.hint) from error
        try:
            output = run(("sbatch", *self._options(launch)), script, dict(launch.secrets))
        except CommandFailedError as error:
            raise SubmissionRejectedError(
                f"Slurm rejected the job: {error.output}",
                "correct the backend's options or the launch, and submit again",
            ) from error
        except BackendDownError as error:
            return self._find_submitted(launch.name, error)
        job_id = output.strip().splitlines()[-1].partition(";")[0]
        return _handle(self._await_row(job_id))

    def status(self, job: JobHandle) -> JobStatus:
        """Return the job's status: from the controller's memory, else from accounting, else "vanished"."""
        identity = SlurmIdentity.of(job)
        for row in commands.controller_rows(f"--jobs={job.id}"):
            if identity.means(row):
                return row.status
        accounted = identity.last_start(commands.accounting_rows(f"--jobs={job.id}"))
        if accounted is not None:
            return accounted.status
        return JobStatus(
            "vanished", detail="Slurm no longer remembers it (MinJobAge), and accounting has no record of it"
        )

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """Return the job's output if its file can be read from here."""
        path = str(job.details.get("log") or "") or self._output_of(job)
        return read_part(Path(path), cursor) if path else LogPart(b"", cursor)

    def stop(self, job: JobHandle) -> JobStatus:
        """Send SIGTERM to what runs under ``srun``; a waiting job is cancelled.

        A job that others submitted and that does not use ``srun`` gets the signal in its batch script and all of its processes.
        """
        if (before := self.status(job)).state == "queued":
            self._cancel(job, "--state=PENDING")
        elif before.state == "running":
            self._terminate(job)
        return before if before.is_over else self.status(job)

    def kill(self, job: JobHandle) -> JobStatus:
        """Cancel the job: SIGTERM to all of it, then SIGKILL after the cluster's KillWait."""
        if (before := self.status(job)).is_over:
            return before
        self._cancel(job)
        return self.status(job)

    def jobs(self) -> list[JobHandle]:
        """List this user's jobs, identified by their comment. A job with ``extra={"comment": …}`` is not included."""
        rows = commands.controller_rows(f"--user={getpass.getuser()}")
        return [_handle(row) for row in rows if row.comment == MARK and not row.status.is_over]

    def find(self, name: str) -> JobHandle | None:
        """Return this user's job with this name: from the controller's memory, else from accounting."""
        rows = commands.last_rows(f"--user={getpass.getuser()}", f"--name={name}")
        return _handle(rows[-1]) if rows else None

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """Return the job with this number, or the task of an array (``12_3``), in its last start.

        Raises:
            JobNotFoundError: there is no such job, or several.
        """
        if not commands.is_job_id(id):
            raise JobNotFoundError(f"{id!r} is not a Slurm job id", "use a number as squeue shows it")
        rows = commands.last_rows(f"--jobs={id}")
        if not rows:
            raise JobNotFoundError(f"Slurm has no job {id!r}", "see squeue and sacct for job ids")
        if len(rows) > 1:
            raise JobNotFoundError(f"job {id!r} is an array", f"name one of its tasks: {id}_0")
        return _handle(rows[0])

    def check_may_stop(self, job: JobHandle) -> None:
        """Check that this process's user may stop the job: its owner, or Slurm's user, an operator or a coordinator.

        Raises:
            BackendError: the job belongs to another user.
        """
        for row in commands.controller_rows(f"--jobs={job.id}"):
            check_may_stop(row)

    def settled(self, job: JobHandle) -> JobHandle:
        """Return the same job with its identity in canonical form.

        Raises:
            ConfigError: the identity is not a Slurm identity, or the id is not a job number.
        """
        if not commands.is_job_id(job.id) or "_" in job.id:
            raise ConfigError(
                f"{job.id!r} is not a Slurm job id", "use its number, as Slurm.reattach returns it"
            )
        return JobHandle(job.backend, job.id, SlurmIdentity.of(job).as_data(), job.details)

    def _options(self, launch: Launch) -> list[str]:
        options: dict[str, str | None] = {
            "parsable": None,
            "export": "ALL",
            "comment": MARK,
            "chdir": str(launch.folder),
            "nodes": str(self.nodes),
            "ntasks-per-node": str(self.tasks_per_node),
            "requeue" if self.requeue else "no-requeue": None,
            "open-mode": "append",
        }
        optional = {
            "job-name": launch.name or None,
            "output": None if launch.log is None else str(launch.log).replace("%", "%%"),
            "partition": self.partition,
            "cpus-per-task": None if self.cpus_per_task is None else str(self.cpus_per_task),
            "gpus-per-node": None if self.gpus_per_node is None else str(self.gpus_per_node),
            "mem": self.memory,
            "time": self.time,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
        }
        options.update({name: value for name, value in optional.items() if value is not None})
        options.update(self.extra)
        return [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]

    def _await_row(self, job_id: str) -> JobRow:
        cause: BackendError | None = None
        for attempt in range(_ATTEMPTS):
            time.sleep(0.5 * attempt)
            try:
                if rows := commands.last_rows(f"--jobs={job_id}"):
                    return rows[-1]
            except (BackendDownError, CredentialsExpiredError) as error:
                cause = error
                break
        raise BackendDownError(
            f"Slurm accepted job {job_id}, but does not show it ({cause.what if cause else 'it does not know the job'})",
            f"look for it with scontrol show job {job_id}; use watchstep attach once it is visible",
        ) from cause

    def _find_submitted(self, name: str, error: BackendDownError) -> JobHandle:
        """Return a job whose submission got no answer.

        Raises:
            BackendDownError: there is none, or the answer cannot be determined.
        """
        if name:
            job = self.find(name)
            if job is not None:
                return job
        raise error

    def _output_of(self, job: JobHandle) -> str:
        identity = SlurmIdentity.of(job)
        rows = commands.controller_rows(f"--jobs={job.id}")
        return next((row.output for row in rows if identity.means(row)), "")

    def _terminate(self, job: JobHandle) -> None:
        rows = commands.controller_rows(f"--jobs={job.id}")
        if any(row.comment == MARK for row in rows):
            # Signal the batch script first: if it is about to start the program, it does not.
            self._cancel(job, "--state=RUNNING", "--signal=TERM", "--batch")
        elif not commands.has_steps(job.id):
            self._cancel(job, "--state=RUNNING", "--signal=TERM", "--full")
            return
        self._cancel(job, "--state=RUNNING", "--signal=TERM")

    def _cancel(self, job: JobHandle, *options: str) -> None:
        try:
            run(("scancel", *options, job.id))
        except CommandFailedError as error:
            # The job ended in between, or is ending: the caller's next `status` decides. For steps that are gone,
            # scancel fails without output.
            if not any(
                sign in error.output.lower() for sign in ("invalid job", "already", "not running", SILENT)
            ):
                raise


def _handle(row: JobRow) -> JobHandle:
    details = {"log": row.output} if row.output else {}
    return JobHandle(NAME, row.id, SlurmIdentity.of_row(row).as_data(), details)
