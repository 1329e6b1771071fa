"""Jobs of a Slurm cluster, by its own commands, and their batch scripts. See ``docs/launch/slurm.md``."""

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
    # Below what the kernel gives to connections, and not where somebody listens.
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
    while (exec 3<>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done
    export MASTER_PORT
fi
"""

_OTHERS_SECONDS = 300
"""So long the other tasks may go on once the first has ended: they may wait for it for ever, or save a checkpoint."""

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
    """The script. Arguments and values reach the command as they are.

    With several tasks each finds ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``, as ``torch.distributed`` reads them; with one to a node ``torchrun`` finds its nodes by the same.
    ``MASTER_ADDR`` is the first node's hostname and the port, which follows from the job's id, is free there, unless
    the environment has them.

    Raises:
        ConfigError: something of it no program can be given.
    """
    parts = [_HEAD, _exports(launch.environment), _FOR_ALL]
    ranks = ""
    if tasks > 1:
        parts.append(_RANKS)
        ranks = _TASK_RANKS.format(local=tasks_per_node) + (_AGENT if tasks_per_node == 1 else "")
    task = ("bash", "-c", f'{ranks}exec "$@"', "watchstep-task", *launch.command)
    for text in launch.command:
        _check("an argument", text)
    together = (f"--wait={_OTHERS_SECONDS}",) if tasks > 1 else ()
    srun = ("srun", "--input=none", "--export=ALL", *together, *task)
    parts.append(_TAIL.format(command=shlex.join(srun)))
    return "".join(parts)


def check_environment(environment: Mapping[str, str]) -> None:
    """See that each variable can be set in a job.

    Raises:
        ConfigError: one cannot.
    """
    for name, value in environment.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"environment variable {name!r}: Slurm's jobs cannot have it", "use letters, digits and '_'"
            )
        _check(f"environment variable {name}", value)


def _exports(environment: Mapping[str, str]) -> str:
    check_environment(environment)
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def _check(what: str, text: str) -> None:
    if "\0" in text:
        raise ConfigError(f"{what} has a zero byte: {text[:80]!r}", "leave it out")


NAME = "slurm"
_LOOKS = 3

Word = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f][^\x00-\x1f]*$", max_length=200)]
OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=40)]


class Slurm(BackendModel):
    """Submits by ``sbatch``, looks by ``squeue`` and ``sacct``, stops by ``scancel``.

    Which cluster these speak to is the machine's business: ``/etc/slurm/slurm.conf``, or ``SLURM_CONF``. A job that Slurm
    requeues stays the same job.

    ``scancel`` names a job by its id alone. Slurm gives an id again only once it has counted through millions of
    others, or its state was wiped: should that happen in the milliseconds between the look and the signal, the signal
    would reach the other job.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 5.0
    shares_files: ClassVar[bool] = True
    submission_seconds: ClassVar[float] = 60.0  # sbatch outlives its launcher, and gives up long before

    partition: Word | None = Field(
        None, description="Partition to run in; the cluster's default where it is left out."
    )
    nodes: int = Field(1, ge=1, description="Nodes that the job gets.")
    tasks_per_node: int = Field(1, ge=1, description="How often the command is started on each node.")
    cpus_per_task: int | None = Field(None, ge=1, description="CPUs for each of these.")
    gpus_per_node: int | None = Field(None, ge=1, description="GPUs on each node.")
    memory: Word | None = Field(None, description="Memory of each node, as --mem takes it: 64G.")
    time: Word | None = Field(None, description="Longest time, as --time takes it: 12:00:00, 2-00.")
    account: Word | None = Field(None, description="Account that the job is charged to.")
    qos: Word | None = Field(None, description="Quality of service.")
    constraint: Word | None = Field(None, description="Features that its nodes must have.")
    requeue: bool = Field(
        True, description="Whether Slurm may start it again after preemption or a node's failure."
    )
    extra: Mapping[OptionName, Word | None] = Field(
        default_factory=dict,
        description="Other long options of sbatch: {'reservation': 'week', 'exclusive': None}.",
    )

    def submit(self, launch: Launch) -> JobHandle:
        """Submit a batch script that starts the command under ``srun``, once for each task.

        The job has the launcher's own environment, too, as Slurm's users expect.

        Raises:
            SubmissionRejectedError: sbatch refused it; the message has its reason.
        """
        try:
            script = batch_script(launch, self.nodes * self.tasks_per_node, self.tasks_per_node)
            check_environment(launch.secrets)
        except ConfigError as error:
            raise SubmissionRejectedError(error.what, error.hint) from error
        try:
            said = run(("sbatch", *self._options(launch)), script, dict(launch.secrets))
        except CommandFailedError as error:
            raise SubmissionRejectedError(
                f"Slurm took no job: {error.said}",
                "correct the backend's options or the launch, and submit again",
            ) from error
        except BackendDownError as error:
            return self._found_by_name(launch.name, error)
        job_id = said.strip().splitlines()[-1].partition(";")[0]
        return _handle(self._just_submitted(job_id))

    def status(self, job: JobHandle) -> JobStatus:
        """How the job is: from the controller's memory, else from accounting, else "vanished"."""
        identity = SlurmIdentity.of(job)
        for row in commands.held_in_memory(f"--jobs={job.id}"):
            if identity.means(row):
                return row.status
        if (found := identity.among_accounted(commands.accounted(f"--jobs={job.id}"))) is not None:
            return found.status
        return JobStatus(
            "vanished", detail="Slurm remembers it no more (MinJobAge), and no accounting has it"
        )

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """What the job wrote, where its output's file can be read from here."""
        place = str(job.details.get("log") or "") or self._output_of(job)
        return read_part(Path(place), cursor) if place else LogPart(b"", cursor)

    def stop(self, job: JobHandle) -> JobStatus:
        """SIGTERM to what runs under ``srun``; a job that waits is cancelled.

        Of a job that others submitted, and that does not use ``srun``, the batch script and all that it started get it.
        """
        if (before := self.status(job)).state == "queued":
            self._cancel(job, "--state=PENDING")
        elif before.state == "running":
            self._ask(job)
        return before if before.is_over else self.status(job)

    def kill(self, job: JobHandle) -> JobStatus:
        """Cancel the job: SIGTERM to all of it, and SIGKILL after the cluster's KillWait."""
        if (before := self.status(job)).is_over:
            return before
        self._cancel(job)
        return self.status(job)

    def jobs(self) -> list[JobHandle]:
        """This user's, by their comment; with ``extra={"comment": …}`` a job is not among them."""
        rows = commands.held_in_memory(f"--user={getpass.getuser()}")
        return [_handle(row) for row in rows if row.comment == MARK and not row.status.is_over]

    def find(self, name: str) -> JobHandle | None:
        """This user's job with this name: from the controller's memory, else from accounting."""
        rows = commands.known(f"--user={getpass.getuser()}", f"--name={name}")
        return _handle(rows[-1]) if rows else None

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """The job with this number, or the task of an array (``12_3``), as it was started last.

        Raises:
            JobNotFoundError: there is none, or several.
        """
        if not commands.is_job_id(id):
            raise JobNotFoundError(f"job {id!r}: no job id of Slurm's", "give a number, as squeue shows it")
        rows = commands.known(f"--jobs={id}")
        if not rows:
            raise JobNotFoundError(f"job {id!r}: Slurm knows none", "see squeue and sacct for their numbers")
        if len(rows) > 1:
            raise JobNotFoundError(f"job {id!r}: is an array", f"name one of its tasks: {id}_0")
        return _handle(rows[0])

    def check_may_stop(self, job: JobHandle) -> None:
        """See that this process's user may stop the job: its own, or any as Slurm's user, operator or coordinator.

        Raises:
            BackendError: it is another user's.
        """
        for row in commands.held_in_memory(f"--jobs={job.id}"):
            check_may_stop(row)

    def settled(self, job: JobHandle) -> JobHandle:
        """The same, its identity spelt as this class spells it.

        Raises:
            ConfigError: the identity is not one of Slurm's, or the id no job's number.
        """
        if not commands.is_job_id(job.id) or "_" in job.id:
            raise ConfigError(
                f"job {job.id!r}: no job id of Slurm's", "give its number, as reattach tells it"
            )
        return JobHandle(job.backend, job.id, SlurmIdentity.of(job).as_data(), job.details)

    def _options(self, launch: Launch) -> list[str]:
        named: dict[str, str | None] = {
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
        named.update({name: value for name, value in optional.items() if value is not None})
        named.update(self.extra)
        return [f"--{name}" if value is None else f"--{name}={value}" for name, value in named.items()]

    def _just_submitted(self, job_id: str) -> JobRow:
        why: BackendError | None = None
        for look in range(_LOOKS):
            time.sleep(0.5 * look)
            try:
                if rows := commands.known(f"--jobs={job_id}"):
                    return rows[-1]
            except (BackendDownError, CredentialsExpiredError) as error:
                why = error
                break
        raise BackendDownError(
            f"job {job_id} was taken, and Slurm does not say when ({why.what if why else 'it knows it no more'})",
            f"look for it with scontrol show job {job_id}; watchstep attach takes it once it is seen",
        ) from why

    def _found_by_name(self, name: str, error: BackendDownError) -> JobHandle:
        """A job whose submission got no answer.

        Raises:
            BackendDownError: there is none, or nobody knows.
        """
        if name:
            found = self.find(name)
            if found is not None:
                return found
        raise error

    def _output_of(self, job: JobHandle) -> str:
        identity = SlurmIdentity.of(job)
        rows = commands.held_in_memory(f"--jobs={job.id}")
        return next((row.output for row in rows if identity.means(row)), "")

    def _ask(self, job: JobHandle) -> None:
        rows = commands.held_in_memory(f"--jobs={job.id}")
        if any(row.comment == MARK for row in rows):
            # Our script is told first: should it be about to start the program, it does not.
            self._cancel(job, "--state=RUNNING", "--signal=TERM", "--batch")
        elif not commands.has_steps(job.id):
            self._cancel(job, "--state=RUNNING", "--signal=TERM", "--full")
            return
        self._cancel(job, "--state=RUNNING", "--signal=TERM")

    def _cancel(self, job: JobHandle, *options: str) -> None:
        try:
            run(("scancel", *options, job.id))
        except CommandFailedError as error:
            # It ended in between, or has begun to: what `status` says after this counts. Of steps that are gone
            # scancel says nothing, and fails.
            if not any(
                sign in error.said.lower() for sign in ("invalid job", "already", "not running", SILENT)
            ):
                raise


def _handle(row: JobRow) -> JobHandle:
    details = {"log": row.output} if row.output else {}
    return JobHandle(NAME, row.id, SlurmIdentity.of_row(row).as_data(), details)
