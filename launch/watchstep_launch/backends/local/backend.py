"""Jobs that are processes of this machine. Linux only.

Starting a local job through its supervisor.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, ClassVar

from pydantic import Field, PrivateAttr

from watchstep.errors import ConfigError, NotFoundError
from watchstep.platform.process import ProcessIdentity, boot_id, default_folder, user_name
from watchstep_launch.backend import (
    BackendError,
    BackendModel,
    JobHandle,
    JobNotFoundError,
    JobStatus,
    Launch,
    LogPart,
    SubmissionRejectedError,
    read_part,
)
from watchstep_launch.backends.local import supervisor
from watchstep_launch.backends.local.records import Records, check_may_signal

NAME = "local"
_PIDFD_SIGNAL_PROCESS_GROUP = 4  # linux/pidfd.h


class Local(BackendModel):
    """Starts processes in sessions of their own, and signals only the process that was meant.

    Each is started by a small supervisor, which outlives the launcher and writes down how the process ended.

    A pidfd is opened first and the identity (boot, start time) checked after: from then on the descriptor means that
    process, whatever becomes of its id. A process that leads its group is signalled with its group, in one call, so that
    each process receives the signal once. Kernels from 6.9 on take the group from the descriptor. On older ones it is named
    by its id, while the descriptor is open; another group could have that id only if the whole group ended and the id was
    reused between two system calls.

    Only processes with a job record of their own user are signalled (`check_may_signal`), and none of this process's own.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 0.0
    shares_files: ClassVar[bool] = True
    submission_seconds: ClassVar[float] = (
        0.0  # a supervisor whose launcher has ended ends what it has started
    )

    folder: Path | None = Field(
        None,
        description="Where it keeps records and logs of its jobs; WATCHSTEP_JOBS or ~/.watchstep/jobs where it is left out.",
    )
    _starting: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @property
    def records(self) -> Records:
        """What is kept of its jobs."""
        return Records(default_folder() if self.folder is None else self.folder)

    def submit(self, launch: Launch) -> JobHandle:
        """Start a process. To what this process's environment has, the launch's is added.

        Raises:
            SubmissionRejectedError: the program is missing, or the log or folder cannot be used.
        """
        log = launch.log if launch.log is not None else self.records.new_log(launch.name)
        with self._starting:
            identity = start(launch, log, self.records)
        return job_of(identity, log)

    def status(self, job: JobHandle) -> JobStatus:
        """How the process is; with its exit code where this backend started it, in whatever process."""
        identity = identity_of(job)
        if identity.boot != boot_id() and identity.host != socket.gethostname():
            return JobStatus("unknown", detail=f"it runs on host {identity.host!r}, not on this one")
        if identity.is_running():
            return JobStatus("running")
        return self._ended(identity)

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """What the process wrote to the log that it was started with; nothing of one that another started."""
        place = job.details.get("log") or self.records.log_of(identity_of(job))
        return read_part(Path(place), cursor) if place else LogPart(b"", cursor)

    def stop(self, job: JobHandle) -> JobStatus:
        """SIGTERM to the process and its group."""
        return self._signal(job, signal.SIGTERM)

    def kill(self, job: JobHandle) -> JobStatus:
        """SIGKILL to the process and its group."""
        return self._signal(job, signal.SIGKILL)

    def jobs(self) -> list[JobHandle]:
        """Those of this machine and folder that still run."""
        return [job_of(identity, log) for identity, log in self.records.kept() if identity.is_running()]

    def find(self, name: str) -> JobHandle | None:
        """The job of a launch with this name that has no log of its own, whether or not it is over; None where none was started."""
        found = self.records.named(name)
        return None if found is None else job_of(*found)

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """The process with this id now.

        Raises:
            JobNotFoundError: there is none, or it is no process id.
        """
        if not id.isascii() or not id.isdecimal():
            raise JobNotFoundError(f"job {id!r}: no process id", "give the id of a process of this machine")
        job = job_of_pid(int(id))
        log = self.records.log_of(identity_of(job))
        return job if log is None else job_of(identity_of(job), Path(log))

    def check_may_stop(self, job: JobHandle) -> None:
        """See that this process's user may stop the process: its own, or any as root.

        Raises:
            BackendError: it is another user's.
        """
        try:
            owner = Path(f"/proc/{identity_of(job).pid}").stat().st_uid
        except FileNotFoundError:
            return  # it ended just now, as whoever stops it will see
        if os.geteuid() in (0, owner):
            return
        raise BackendError(
            f"job local:{job.id}: is user {user_name(owner)}'s", "attach as the user that it runs as"
        )

    def settled(self, job: JobHandle) -> JobHandle:
        """The same process, its identity spelt as this class spells it.

        Raises:
            ConfigError: the identity is not a local process's, the id is another's, or the process must not be signalled.
        """
        identity = identity_of(job)
        if job.id != str(identity.pid):
            raise ConfigError(
                f"job {job.id!r}: its identity is that of process {identity.pid}", "give the process id as id"
            )
        check_may_signal(identity, self.records.folder)
        return JobHandle(job.backend, job.id, asdict(identity), job.details)

    def _ended(self, identity: ProcessIdentity) -> JobStatus:
        if not self.records.is_kept(identity):
            return JobStatus("vanished", detail="it has ended; it was not started here, so nobody knows how")
        return self.records.ending(identity)

    def _signal(self, job: JobHandle, number: signal.Signals) -> JobStatus:
        before = self.status(job)
        if before.state != "running":
            return before
        identity = identity_of(job)
        try:
            descriptor = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            return self.status(job)
        except OSError as error:  # a thread's id, or 0 and below
            raise BackendError(
                f"process {identity.pid}: cannot be signalled ({error.strerror})", "bind the job's process"
            ) from error
        try:
            if identity.is_running():
                check_may_signal(identity, self.records.folder)
                _send(descriptor, identity.pid, number)
        except ProcessLookupError:
            return self.status(job)  # it ended by itself in between
        except ConfigError as error:
            raise BackendError(error.what, error.hint) from error
        except PermissionError as error:
            raise BackendError(
                f"process {identity.pid} may not be signalled ({error})",
                "stop it as the user that it runs as",
            ) from error
        finally:
            os.close(descriptor)
        return self.status(job)


def _send(descriptor: int, pid: int, number: signal.Signals) -> None:
    """Signal a process, and its group with it where it leads one. Each process receives the signal once.

    Raises:
        ProcessLookupError: it has ended.
        PermissionError: this user may not signal it.
    """
    if os.getpgid(pid) != pid:
        signal.pidfd_send_signal(descriptor, number)
        return
    try:
        signal.pidfd_send_signal(descriptor, number, None, _PIDFD_SIGNAL_PROCESS_GROUP)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.killpg(pid, number)  # a kernel before 6.9


def job_of(identity: ProcessIdentity, log: Path | None = None) -> JobHandle:
    """The job that is this process."""
    details = {} if log is None else {"log": str(log)}
    return JobHandle(NAME, str(identity.pid), asdict(identity), details)


def identity_of(job: JobHandle) -> ProcessIdentity:
    """The process that a job is.

    Raises:
        ConfigError: the identity is not a local process's.
    """
    held: dict[str, Any] = dict(job.identity)
    try:
        return ProcessIdentity(
            int(held["pid"]), int(held["start_ticks"]), str(held["boot"]), str(held["host"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"job {job.id!r}: its identity is not a local process's ({error!r})",
            "bind it with pid, start_ticks, boot and host, as watchstep.platform.process gives them",
        ) from error


def job_of_pid(pid: int) -> JobHandle:
    """The job that is the process with this id now.

    Raises:
        JobNotFoundError: there is none.
    """
    missing = JobNotFoundError(f"process {pid}: not running", "it has ended already")
    try:
        identity = ProcessIdentity.of(pid)
    except NotFoundError:
        raise missing from None
    if not identity.is_running():
        raise missing
    return job_of(identity)


_KEEPER = (sys.executable, "-I", "-S", "-X", "utf8", supervisor.__file__)


def start(launch: Launch, log: Path, records: Records) -> ProcessIdentity:
    """Start a program; it is known to the records when this returns.

    Raises:
        SubmissionRejectedError: it cannot be started; nothing of it runs.
    """
    records.prepare()
    asked = {
        "command": launch.command,
        "environment": {**os.environ, **launch.environment, **launch.secrets},
        "folder": str(launch.folder),
        "log": str(log),
    }
    watched = subprocess.Popen(  # noqa: S603 - this package's own script
        _KEEPER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
        encoding="utf-8",
    )
    # Reaped by whoever started it, and by init should that end first.
    threading.Thread(target=watched.wait, name=f"reaper-{watched.pid}", daemon=True).start()
    assert watched.stdin is not None
    assert watched.stdout is not None
    with watched.stdin, watched.stdout:
        return _settle(watched.stdin, watched.stdout, (launch, asked, log, records))


def _settle(
    said: IO[str], heard: IO[str], what: tuple[Launch, dict[str, Any], Path, Records]
) -> ProcessIdentity:
    launch, asked, log, records = what
    try:
        said.write(json.dumps(asked) + "\n")
        said.flush()
        answer = json.loads(heard.readline() or '{"error": "its supervisor ended"}')
        if "error" in answer:
            raise SubmissionRejectedError(
                f"command {launch.command[0]!r} in {launch.folder}: cannot be started ({answer['error']})",
                "check the program's name, the folder and the log's path",
            )
        # The supervisor does not let the process go before it is told where to write: its entry in /proc stays.
        identity = ProcessIdentity.of(int(answer["pid"]))
        records.keep(identity, log)
        said.write(f"{records.exit_of(identity)}\n")
        said.flush()
    except (OSError, NotFoundError) as error:
        raise SubmissionRejectedError(
            f"command {launch.command[0]!r}: its record in {records.folder} cannot be written ({error})",
            "see to the space and the permissions of that folder",
        ) from error
    return identity
