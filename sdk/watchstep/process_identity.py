"""Which process is meant, so that a reused process id is never taken for it. Linux only."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from watchstep.errors import ConfigError, NotFoundError

_START_TIME = 19  # fields of /proc/PID/stat after the command, counted from 0; proc(5) numbers it 22
_STATE = 0


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of one boot of one host.

    Attributes:
        pid: its process id.
        start_ticks: when it started, in clock ticks since boot; kept by exec.
        boot: the kernel's id of that boot.
        host: the host's name, for people.
    """

    pid: int
    start_ticks: int
    boot: str
    host: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The process that has this id now.

        Raises:
            NotFoundError: there is none.
            ConfigError: the system has no /proc.
        """
        boot = boot_id()  # first, so that a system without /proc is told as one
        return cls(pid, int(_stat(pid)[_START_TIME]), boot, socket.gethostname())

    def is_running(self) -> bool:
        """Whether this very process still runs on this host; a zombie does not."""
        try:
            fields = _stat(self.pid)
        except NotFoundError:
            return False
        return (
            self.boot == boot_id()
            and int(fields[_START_TIME]) == self.start_ticks
            and fields[_STATE] not in "ZX"
        )


def pid_namespace() -> str:
    """The kernel's name of the PID namespace in which this process sees process ids; empty where it tells none."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def boot_id() -> str:
    """The kernel's id of this boot.

    Raises:
        ConfigError: the system has no /proc.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(
            f"processes cannot be told apart on this system ({error.strerror})",
            "run local jobs on Linux, or leave out the stop action",
        ) from error


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NotFoundError(f"process {pid}: not running", "it has ended already") from error
    return text.rpartition(")")[2].split()
