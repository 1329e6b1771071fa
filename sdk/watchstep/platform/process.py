"""Processes: an identity that survives the reuse of process ids, the record that makes a process a job, and bounded joins of threads. Linux only.

A service requires the record before it sends a signal. A record is a file of the process's own user, so no other user
can make one, except root. It names the process by pid, start time, boot and uid, so it is not valid for a later process
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


FOLDER = "WATCHSTEP_JOBS"
MAX_BYTES = 65536
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


@dataclass(frozen=True)
class ProcessRecord:
    """A process that a launcher declared to be a job.

    Attributes:
        identity: of the process.
        uid: of the process's user when the record was written.
        log: file with its output; empty for a process that was not started with one.
    """

    identity: ProcessIdentity
    uid: int
    log: str = ""

    def write(self, folder: Path) -> Path:
        """Write the record into a folder that no other user can write to.

        Raises:
            OSError: the folder cannot be written.
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
        """Read what `write` wrote.

        Raises:
            ValueError: it has another form.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            return cls(ProcessIdentity(**data["identity"]), int(data["uid"]), str(data["log"]))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(repr(error)) from error


def default_folder() -> Path:
    """The folder of this user's records: `WATCHSTEP_JOBS`, or ``~/.watchstep/jobs``.

    Raises:
        ConfigError: the variable is not set, and the user has no home folder.
    """
    return absolute_path(os.environ.get(FOLDER) or "~/.watchstep/jobs")


def file_name(identity: ProcessIdentity) -> str:
    """The name of a process's record in its folder."""
    return f"{identity.pid}-{identity.start_ticks}-{identity.boot[:8]}.json"


def record_process(pid: int, folder: Path | None = None) -> ProcessRecord:
    """Declare a running process to be a job; a record that exists already stays as it is.

    Raises:
        ConfigError: the record cannot be written.
        NotFoundError: the process is not running.
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
            f"job record in {place}: cannot be written ({error.strerror})",
            f"set {FOLDER} to a folder that you can write, for the launcher and the service",
        ) from error
    return record


def trusted_record(identity: ProcessIdentity, uid: int, folders: list[Path]) -> ProcessRecord:
    """The record of a process in the first of several folders that has a valid one.

    Args:
        identity: of the process.
        uid: of the process's user now.
        folders: where to look; the folder of the process's user, ``~/.watchstep/jobs``, is looked at as well.

    Raises:
        ConfigError: no folder has a valid record.
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
            problems.append(f"the one in {folder} is not valid: {error}")
    raise ConfigError(
        f"process {identity.pid} of user {user_name(uid)}: no valid job record ({'; '.join(problems)})",
        f"start it with 'watchstep run' or an Estimator, or run 'watchstep attach --job local:{identity.pid}' as"
        f" {user_name(uid)}, with the same {FOLDER} as the service",
    )


def user_of(pid: int) -> int:
    """The uid of a process.

    Raises:
        NotFoundError: the process is not running.
        ConfigError: it runs with several uids, or the id is a thread's.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NotFoundError(f"process {pid}: not running", "it has ended already") from error
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    if int(fields["Tgid"]) != pid:
        raise ConfigError(f"process {pid}: is a thread", f"name its process, {fields['Tgid'].strip()}")
    real, effective, saved, _ = (int(word) for word in fields["Uid"].split())
    if not real == effective == saved:
        raise ConfigError(
            f"process {pid}: runs with several uids (real {real}, effective {effective}, saved {saved})",
            "a job runs as one user",
        )
    return real


def user_name(uid: int) -> str:
    """The name of a user; the number where there is no name."""
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
    """Read a record through descriptors, so that what is checked is what is read.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: another user could have written it, or it is another process's.
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
    """Wait for a thread to end. None, one that has not started and the calling thread are not waited for.

    Args:
        thread: which.
        is_late: whether to wait no longer; asked often.
        longest: seconds to wait at most.
    """
    if thread is None or thread is threading.current_thread():
        return
    until = time.monotonic() + longest
    while thread.is_alive() and not is_late() and time.monotonic() < until:
        thread.join(_LOOK_SECONDS)
