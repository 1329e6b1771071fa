"""Jobs that are processes of this machine. Linux only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from dataclasses import asdict
from typing import Any

from watchstep.errors import ConfigError, NotFoundError
from watchstep.process_identity import ProcessIdentity, boot_id
from watchstep_services.estimator.backend import JobHandle, JobStatus, Launch

NAME = "local"


class LocalBackend:
    """Starts processes in sessions of their own, and signals only the process that was meant.

    A pidfd is opened first and the identity (boot, start time) checked after: from then on the descriptor means that
    process, whatever becomes of its id. The rest of its group is signalled while the descriptor is held and only if
    the process leads the group; the id could be taken by another group only if the whole group ended and the id
    came round again between two system calls.
    """

    def __init__(self) -> None:
        self._children: dict[ProcessIdentity, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def submit(self, launch: Launch) -> JobHandle:
        """Start a process.

        Raises:
            ConfigError: the program is missing, or the log or folder cannot be used.
        """
        try:
            with launch.log.open("ab") as log:
                child = subprocess.Popen(  # noqa: S603 - running the user's command is what this is for
                    launch.command,
                    cwd=launch.folder,
                    env=dict(launch.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(
                f"command {launch.command[0]!r} in {launch.folder}: cannot be started ({error})",
                "check the program's name, the folder and the log's path",
            ) from error
        # The child is not reaped before this: its entry in /proc stays, even if it has ended.
        identity = ProcessIdentity.of(child.pid)
        with self._lock:
            self._children[identity] = child
        threading.Thread(target=child.wait, name=f"reaper-{child.pid}", daemon=True).start()
        return job_of(identity)

    def status(self, job: JobHandle) -> JobStatus:
        """How the process is; its exit code where this backend started it."""
        identity = identity_of(job)
        if identity.boot != boot_id() and identity.host != socket.gethostname():
            return JobStatus("unknown", detail=f"it runs on host {identity.host!r}, not on this one")
        with self._lock:
            child = self._children.get(identity)
        if child is not None:
            code = child.poll()
            return JobStatus("running") if code is None else JobStatus("gone", code)
        return JobStatus("running" if identity.is_running() else "gone")

    def stop(self, job: JobHandle) -> JobStatus:
        """SIGTERM to the process and its group."""
        return self._signal(job, signal.SIGTERM)

    def kill(self, job: JobHandle) -> JobStatus:
        """SIGKILL to the process and its group."""
        return self._signal(job, signal.SIGKILL)

    def _signal(self, job: JobHandle, number: signal.Signals) -> JobStatus:
        before = self.status(job)
        if before.state != "running":
            return before
        identity = identity_of(job)
        try:
            descriptor = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            return self.status(job)
        try:
            if identity.is_running():
                leads = os.getpgid(identity.pid) == identity.pid
                signal.pidfd_send_signal(descriptor, number)
                if leads:
                    os.killpg(identity.pid, number)
        except ProcessLookupError:
            return self.status(job)  # it ended by itself in between
        except PermissionError as error:
            return JobStatus("unknown", detail=f"process {identity.pid} may not be signalled ({error})")
        finally:
            os.close(descriptor)
        return self.status(job)


def job_of(identity: ProcessIdentity) -> JobHandle:
    """The job that is this process."""
    return JobHandle(NAME, str(identity.pid), asdict(identity))


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
            "bind it with pid, start_ticks, boot and host, as watchstep.process_identity gives them",
        ) from error


def job_of_pid(pid: int) -> JobHandle:
    """The job that is the process with this id now.

    Raises:
        NotFoundError: there is none.
    """
    identity = ProcessIdentity.of(pid)
    if not identity.is_running():
        raise NotFoundError(f"process {pid}: not running", "it has ended already")
    return job_of(identity)
