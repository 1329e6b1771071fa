"""Processes: an identity that survives the reuse of process ids, the record that declares a process a job, and bounded joins of threads. Linux only.

A service requires the record before it sends a signal. A record is a file owned by the process's user, so no other user
can create one, except root. It identifies the process by pid, start time, boot and uid, so it is not valid for a later process
with the same pid.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from watchstep.errors import ConfigError, NotFoundError
from watchstep.platform.folders import absolute_path

_START_TIME = 19  # index among the fields of /proc/PID/stat after the command, from 0; number 22 in proc(5)
_STATE = 0


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of one boot of one host.

    Attributes:
        pid: Process id.
        start_ticks: Start time in clock ticks since boot, which exec does not change.
        boot: The kernel's id of the boot.
        host: Name of the host, for users.
    """

    pid: int
    start_ticks: int
    boot: str
    host: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the current process with this id.

        Raises:
            NotFoundError: No such process is running.
            ConfigError: The system has no /proc.
        """
        boot = boot_id()  # first, so that a missing /proc is reported as such
        return cls(pid, int(_stat(pid)[_START_TIME]), boot, socket.gethostname())

    def is_running(self) -> bool:
        """Return whether this process still runs on this host. A zombie does not."""
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
    """Return the kernel's name of this process's PID namespace; empty if it is unknown."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def boot_id() -> str:
    """Return the kernel's id of this boot.

    Raises:
        ConfigError: The system has no /proc.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(
            f"processes cannot be identified on this system ({error.strerror})",
            "run local jobs on Linux, or leave out the stop action",
        ) from error


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NotFoundError(f"process {pid} is not running", "it may have ended already") from error
    return text.rpartition(")")[2].split()


FOLDER = "WATCHSTEP_JOBS"
MAX_BYTES = 65536
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


@dataclass(frozen=True)
class ProcessRecord:
    """A process that a launcher declared a job.

    Attributes:
        identity: Identity of the process.
        uid: Uid of the process when the record was written.
        log: File with its output; empty for a process without one.
    """

    identity: ProcessIdentity
    uid: int
    log: str = ""

    def write(self, folder: Path) -> Path:
        """Write the record into a folder that no other user can write to.

        Raises:
            OSError: The folder cannot be written.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat()
        if mode.st_uid == os.geteuid() and mode.st_mode & _OTHERS_WRITE:
            folder.chmod(stat.S_IMODE(mode.st_mode) & ~_OTHERS_WRITE)
        place = folder / file_name(self.identity)
        partial = place.with_suffix(f".{os.getpid()}.partial")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"identity": asdict(self.identity), "uid": self.uid, "log": self.log}, file)
        partial.replace(place)
        return place

    @classmethod
    def parse(cls, text: str) -> ProcessRecord:
        """Parse a record of `write`.

        Raises:
            ValueError: The text has another form.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            return cls(ProcessIdentity(**data["identity"]), int(data["uid"]), str(data["log"]))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(repr(error)) from error


def default_folder() -> Path:
    """Return the folder of this user's records: `WATCHSTEP_JOBS`, or ``~/.watchstep/jobs``.

    Raises:
        ConfigError: The variable is not set, and the user has no home folder.
    """
    return absolute_path(os.environ.get(FOLDER) or "~/.watchstep/jobs")


def file_name(identity: ProcessIdentity) -> str:
    """Return the file name of a process's record."""
    return f"{identity.pid}-{identity.start_ticks}-{identity.boot[:8]}.json"


def record_process(pid: int, folder: Path | None = None) -> ProcessRecord:
    """Declare a running process a job. An existing record is not changed.

    Raises:
        ConfigError: The record cannot be written.
        NotFoundError: The process is not running.
    """
    place = default_folder() if folder is None else folder
    identity = ProcessIdentity.of(pid)
    uid = user_of(pid)
    try:
        return trusted_record(identity, uid, [place])
    except ConfigError:
        pass
    record = ProcessRecord(identity, uid)
    try:
        record.write(place)
    except OSError as error:
        raise ConfigError(
            f"cannot write a job record in {place} ({error.strerror})",
            f"set {FOLDER} to a folder that you can write, for the launcher and the service",
        ) from error
    return record


def trusted_record(identity: ProcessIdentity, uid: int, folders: list[Path]) -> ProcessRecord:
    """Return the record of a process from the first folder with a valid one.

    Args:
        identity: Identity of the process.
        uid: Current uid of the process.
        folders: Folders to search, in addition to ``~/.watchstep/jobs`` of the process's user.

    Raises:
        ConfigError: No folder has a valid record.
    """
    problems = []
    for folder in dict.fromkeys([*folders, *_folder_of_user(uid)]):
        try:
            return _read(identity, uid, folder)
        except FileNotFoundError:
            problems.append(f"none in {folder}")
        except OSError as error:
            problems.append(f"{folder} cannot be read ({error.strerror})")
        except ValueError as error:
            problems.append(f"the record in {folder} is not valid: {error}")
    raise ConfigError(
        f"process {identity.pid} of user {user_name(uid)} has no valid job record ({'; '.join(problems)})",
        f"start it with 'watchstep run' or an Estimator, or run 'watchstep attach --job local:{identity.pid}' as"
        f" {user_name(uid)}, with the same {FOLDER} as the service",
    )


def user_of(pid: int) -> int:
    """Return the uid of a process.

    Raises:
        NotFoundError: The process is not running.
        ConfigError: The process runs with several uids, or the id is of a thread.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NotFoundError(f"process {pid} is not running", "it may have ended already") from error
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    if int(fields["Tgid"]) != pid:
        raise ConfigError(f"process {pid} is a thread", f"use its process, {fields['Tgid'].strip()}")
    real, effective, saved, _ = (int(word) for word in fields["Uid"].split())
    if not real == effective == saved:
        raise ConfigError(
            f"process {pid} runs with several uids (real {real}, effective {effective}, saved {saved})",
            "a job runs as one user",
        )
    return real


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if there is no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _folder_of_user(uid: int) -> list[Path]:
    try:
        return [Path(pwd.getpwuid(uid).pw_dir) / ".watchstep" / "jobs"]
    except KeyError:
        return []


def _read(identity: ProcessIdentity, uid: int, folder: Path) -> ProcessRecord:
    """Read a record through descriptors, so that the checked file is the one that is read.

    Raises:
        OSError: The record does not exist, or cannot be read.
        ValueError: Another user could have written the record, or it is of another process.
    """
    above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_owner("the folder", os.fstat(above), uid)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(file_name(identity), flags, dir_fd=above), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ValueError("it is not a regular file")
            _check_owner("the file", facts, uid)
            content = file.read(MAX_BYTES)
    finally:
        os.close(above)
    record = ProcessRecord.parse(content.decode())
    recorded = record.identity
    if (recorded.pid, recorded.start_ticks, recorded.boot) != (
        identity.pid,
        identity.start_ticks,
        identity.boot,
    ):
        raise ValueError("it is of a process with another start time or boot")
    if record.uid != uid:
        raise ValueError(f"it is of a process of user {user_name(record.uid)}")
    return record


def _check_owner(what: str, facts: os.stat_result, uid: int) -> None:
    if facts.st_uid not in {uid, _ROOT}:
        raise ValueError(f"{what} belongs to user {user_name(facts.st_uid)}")
    if facts.st_mode & _OTHERS_WRITE:
        raise ValueError(f"{what} can be written by others (mode {stat.S_IMODE(facts.st_mode):04o})")


_LOOK_SECONDS = 0.05


def join_until(
    thread: threading.Thread | None, is_late: Callable[[], bool], longest: float = float("inf")
) -> None:
    """Wait for a thread to end. Returns at once for None, a thread that has not started, and the calling thread.

    Args:
        thread: The thread.
        is_late: Returns whether to stop waiting. It is called often.
        longest: Maximum time to wait in seconds.
    """
    if thread is None or thread is threading.current_thread():
        return
    until = time.monotonic() + longest
    while thread.is_alive() and not is_late() and time.monotonic() < until:
        thread.join(_LOOK_SECONDS)
