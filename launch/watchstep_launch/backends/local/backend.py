"""Backend for processes of this machine, started through a supervisor. Linux only."""

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
    """Starts processes in sessions of their own, and signals only the process that the handle identifies.

    Each process is started by a small supervisor, which outlives the launcher and records how the process ended.

    To signal a process, its pidfd is opened first, and its identity (boot, start time) checked afterwards: from then on, the
    descriptor refers to that process even if its id is reused. A process that leads its group is signalled together with its
    group, in one call, so that each process receives the signal once. Kernels from 6.9 on take the group from the descriptor. Older
    kernels need the group's id while the descriptor is open; another group could have that id only if the whole group ended and
    the id was reused between two system calls.

    Only processes with a job record of their own user are signalled (`check_may_signal`), and none of this process's own.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 0.0
    shares_files: ClassVar[bool] = True
    submission_seconds: ClassVar[float] = 0.0  # a supervisor ends its program if the launcher has ended

    folder: Path | None = Field(
        None,
        description="Folder for records and logs of jobs; by default WATCHSTEP_JOBS or ~/.watchstep/jobs.",
    )
    _starting: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @property
    def records(self) -> Records:
        """Records of the backend's jobs."""
        return Records(default_folder() if self.folder is None else self.folder)

    def submit(self, launch: Launch) -> JobHandle:
        """Start a process. The launch's variables are added to this process's environment.

        Raises:
            SubmissionRejectedError: the program is missing, or the log or folder cannot be used.
        """
        log = launch.log if launch.log is not None else self.records.new_log(launch.name)
        with self._starting:
            identity = start(launch, log, self.records)
        return job_of(identity, log)

    def status(self, job: JobHandle) -> JobStatus:
        """Return the process's status, with its exit code if this backend started it, from any process."""
        identity = identity_of(job)
        if identity.boot != boot_id() and identity.host != socket.gethostname():
            return JobStatus("unknown", detail=f"the process runs on host {identity.host!r}, not on this one")
        if identity.is_running():
            return JobStatus("running")
        return self._ended(identity)

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """Return what the process wrote to its log; nothing for a process started otherwise."""
        path = job.details.get("log") or self.records.log_of(identity_of(job))
        return read_part(Path(path), cursor) if path else LogPart(b"", cursor)

    def stop(self, job: JobHandle) -> JobStatus:
        """Send SIGTERM to the process and its group."""
        return self._signal(job, signal.SIGTERM)

    def kill(self, job: JobHandle) -> JobStatus:
        """Send SIGKILL to the process and its group."""
        return self._signal(job, signal.SIGKILL)

    def jobs(self) -> list[JobHandle]:
        """List the jobs of this machine and folder that still run."""
        return [job_of(identity, log) for identity, log in self.records.active() if identity.is_running()]

    def find(self, name: str) -> JobHandle | None:
        """Return the job of a launch with this name and without its own log, whether or not it is over; None if there is none."""
        entry = self.records.find(name)
        return None if entry is None else job_of(*entry)

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """Return the process with this id.

        Raises:
            JobNotFoundError: there is no such process, or the id is not a process id.
        """
        if not id.isascii() or not id.isdecimal():
            raise JobNotFoundError(f"{id!r} is not a process id", "use the id of a process of this machine")
        job = job_of_pid(int(id))
        log = self.records.log_of(identity_of(job))
        return job if log is None else job_of(identity_of(job), Path(log))

    def check_may_stop(self, job: JobHandle) -> None:
        """Check that this process's user may stop the process: its owner, or root.

        Raises:
            BackendError: the process belongs to another user.
        """
        try:
            owner = Path(f"/proc/{identity_of(job).pid}").stat().st_uid
        except FileNotFoundError:
            return  # it ended just now, which the stop will find out
        if os.geteuid() in (0, owner):
            return
        raise BackendError(f"process {job.id} belongs to user {user_name(owner)}", "attach as that user")

    def settled(self, job: JobHandle) -> JobHandle:
        """Return the same process with its identity in canonical form.

        Raises:
            ConfigError: the identity is not a local process's or does not match the id, or the process must not be signalled.
        """
        identity = identity_of(job)
        if job.id != str(identity.pid):
            raise ConfigError(
                f"job {job.id!r}: its identity is that of process {identity.pid}", "use the process id as id"
            )
        check_may_signal(identity, self.records.folder)
        return JobHandle(job.backend, job.id, asdict(identity), job.details)

    def _ended(self, identity: ProcessIdentity) -> JobStatus:
        if not self.records.contains(identity):
            return JobStatus(
                "vanished", detail="ended; its exit code is unknown, because it was not started here"
            )
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
                f"process {identity.pid} cannot be signalled ({error.strerror})", "bind the job's process"
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
    """Signal a process, and its group if it leads one. Each process receives the signal once.

    Raises:
        ProcessLookupError: the process has ended.
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
    """Return the job handle of a process."""
    details = {} if log is None else {"log": str(log)}
    return JobHandle(NAME, str(identity.pid), asdict(identity), details)


def identity_of(job: JobHandle) -> ProcessIdentity:
    """Return the process of a job.

    Raises:
        ConfigError: the identity is not a local process's.
    """
    data: dict[str, Any] = dict(job.identity)
    try:
        return ProcessIdentity(
            int(data["pid"]), int(data["start_ticks"]), str(data["boot"]), str(data["host"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"job {job.id!r}: its identity is not a local process's ({error!r})",
            "use pid, start_ticks, boot and host, as watchstep.platform.process returns them",
        ) from error


def job_of_pid(pid: int) -> JobHandle:
    """Return the job of the process with this id.

    Raises:
        JobNotFoundError: there is no such process.
    """
    missing = JobNotFoundError(f"process {pid} is not running", "use the id of a running process")
    try:
        identity = ProcessIdentity.of(pid)
    except NotFoundError:
        raise missing from None
    if not identity.is_running():
        raise missing
    return job_of(identity)


_SUPERVISOR = (sys.executable, "-I", "-S", "-X", "utf8", supervisor.__file__)


def start(launch: Launch, log: Path, records: Records) -> ProcessIdentity:
    """Start a program. It is recorded when this returns.

    Raises:
        SubmissionRejectedError: the program cannot be started; nothing of it runs.
    """
    records.prepare()
    request = {
        "command": launch.command,
        "environment": {**os.environ, **launch.environment, **launch.secrets},
        "folder": str(launch.folder),
        "log": str(log),
    }
    process = subprocess.Popen(  # noqa: S603 - this package's own script
        _SUPERVISOR,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
        encoding="utf-8",
    )
    # Reaped by this process, or by init if this process ends first.
    threading.Thread(target=process.wait, name=f"reaper-{process.pid}", daemon=True).start()
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        return _record(process.stdin, process.stdout, (launch, request, log, records))


def _record(
    requests: IO[str], answers: IO[str], context: tuple[Launch, dict[str, Any], Path, Records]
) -> ProcessIdentity:
    launch, request, log, records = context
    try:
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        answer = json.loads(answers.readline() or '{"error": "its supervisor ended"}')
        if "error" in answer:
            raise SubmissionRejectedError(
                f"command {launch.command[0]!r} in {launch.folder}: cannot be started ({answer['error']})",
                "check the program's name, the folder and the log's path",
            )
        # The supervisor does not reap the process before it gets the exit file's path, so its entry in /proc remains.
        identity = ProcessIdentity.of(int(answer["pid"]))
        records.add(identity, log)
        requests.write(f"{records.exit_of(identity)}\n")
        requests.flush()
    except (OSError, NotFoundError) as error:
        raise SubmissionRejectedError(
            f"command {launch.command[0]!r}: its record in {records.folder} cannot be written ({error})",
            "check the free space and the permissions of that folder",
        ) from error
    return identity
