"""Records of local jobs in a folder, and the permission to signal their processes."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from watchstep.errors import ConfigError, NotFoundError
from watchstep.platform.process import (
    FOLDER,
    ProcessIdentity,
    ProcessRecord,
    default_folder,
    file_name,
    trusted_record,
    user_of,
)
from watchstep_launch.backend import JobStatus, SubmissionRejectedError

_RETENTION_SECONDS = 30 * 86400.0


@dataclass(frozen=True)
class Records:
    """A folder of records: ``PID-TICKS-BOOT.json`` for each job, and the same with ``.exit`` once it has ended."""

    folder: Path

    def new_log(self, name: str) -> Path:
        """Return the path of a new log."""
        stem = re.sub(r"[^a-zA-Z0-9._-]", "-", name)[:63] or "job"
        return self.folder / f"{stem}-{secrets.token_hex(4)}.log"

    def exit_of(self, identity: ProcessIdentity) -> Path:
        """Return the file to which the supervisor writes how a process ended."""
        return self._record_of(identity).with_suffix(".exit")

    def prepare(self) -> None:
        """Create the folder, and remove the records of jobs that ended a month ago.

        Raises:
            SubmissionRejectedError: the folder cannot be used.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            oldest = time.time() - _RETENTION_SECONDS
            for exit_file in self.folder.glob("*.exit"):
                if exit_file.stat().st_mtime < oldest:
                    self._remove(exit_file)
            # Processes that no supervisor started have no exit file.
            for record in self.folder.glob("*.json"):
                if record.stat().st_mtime < oldest and not self._may_run(record):
                    self._remove(record.with_suffix(".exit"))
        except FileNotFoundError:
            pass  # another launcher removed it just now
        except OSError as error:
            raise SubmissionRejectedError(
                f"jobs folder {self.folder}: cannot be used ({error.strerror})",
                f"set Local(folder=…) or {FOLDER} to a writable folder",
            ) from error

    def add(self, identity: ProcessIdentity, log: Path) -> None:
        """Record that a job started, before its end can be observed.

        Raises:
            OSError: the folder cannot be written.
        """
        ProcessRecord(identity, user_of(identity.pid), str(log)).write(self.folder)

    def contains(self, identity: ProcessIdentity) -> bool:
        """Whether a job was started with this folder."""
        return self.log_of(identity) is not None

    def log_of(self, identity: ProcessIdentity) -> str | None:
        """Return the log of a job that was started with this folder; None if there is none."""
        try:
            return _read(self._record_of(identity)).log or None
        except (OSError, ValueError):
            return None

    def active(self) -> Iterator[tuple[ProcessIdentity, Path]]:
        """Yield the folder's jobs without a known end, with their logs."""
        for path in sorted(self.folder.glob("*.json")):
            if path.with_suffix(".exit").exists():
                continue
            try:
                record = _read(path)
            except (OSError, ValueError):
                continue  # removed just now, or not a record
            if record.log:
                yield record.identity, Path(record.log)

    def find(self, name: str) -> tuple[ProcessIdentity, Path] | None:
        """Return the job that was started under a name with this folder; None if there is none: supervisors end unrecorded jobs."""
        for path in sorted(self.folder.glob("*.json")):
            try:
                record = _read(path)
            except (OSError, ValueError):
                continue  # removed just now, or not a record
            if Path(record.log).name.rpartition("-")[0] == name:
                return record.identity, Path(record.log)
        return None

    def ending(self, identity: ProcessIdentity) -> JobStatus:
        """Return how a process that no longer runs ended.

        The supervisor writes the exit file before it reaps the process, so the file exists unless the supervisor died first.
        """
        for is_last in (False, True):
            try:
                return JobStatus("ended", int(self.exit_of(identity).read_text(encoding="ascii")))
            except FileNotFoundError:
                pass
            except ValueError:
                break
            if not is_last and _is_unreaped(identity):
                return JobStatus("running", detail="it is ending")
        return JobStatus("vanished", detail="its exit code is unknown, because its supervisor ended first")

    def _record_of(self, identity: ProcessIdentity) -> Path:
        return self.folder / file_name(identity)

    def _may_run(self, record: Path) -> bool:
        try:
            return _read(record).identity.is_running()
        except FileNotFoundError:
            return True  # another launcher removed it just now
        except ValueError:
            return False

    def _remove(self, exit_file: Path) -> None:
        record = exit_file.with_suffix(".json")
        try:
            log = Path(_read(record).log)
            if log.parent == self.folder:
                log.unlink(missing_ok=True)
        except (OSError, ValueError):
            pass
        record.unlink(missing_ok=True)
        exit_file.unlink(missing_ok=True)


def _is_unreaped(identity: ProcessIdentity) -> bool:
    """Whether the process has ended, but its supervisor has not reaped it yet."""
    try:
        return ProcessIdentity.of(identity.pid) == identity
    except NotFoundError:
        return False


def _read(path: Path) -> ProcessRecord:
    return ProcessRecord.parse(path.read_text(encoding="utf-8"))


_INIT = 1


def check_may_signal(identity: ProcessIdentity, records: Path) -> None:
    """Check that a running process is a recorded job, and not one of the service's own processes.

    Args:
        identity: the process. One that does not run is never signalled, and is no error.
        records: folder of job records, in addition to those of this user and of the process's user.

    Raises:
        ConfigError: the process must not be signalled.
    """
    # Process 1 of another container may be a job. It does not run here, and is not signalled here.
    if identity.pid < _INIT or (identity.pid == _INIT and identity.is_running()):
        raise ConfigError(
            f"process {identity.pid} is not a job", "bind the training process, by its process id"
        )
    if not identity.is_running():
        return
    try:
        uid = user_of(identity.pid)
        part = _part_of_service(identity.pid)
    except (NotFoundError, ProcessLookupError):
        return  # it ended just now
    if part:
        raise ConfigError(
            f"process {identity.pid} is {part}, which the service never signals",
            "run the service outside the job's process tree, with 'watchstep serve' or as a system service",
        )
    try:
        trusted_record(identity, uid, [records, default_folder()])
    except ConfigError:
        if identity.is_running():
            raise


def _part_of_service(pid: int) -> str:
    """Describe a process that is part of the service; empty if it is not."""
    own = os.getpid()
    if pid == own:
        return "the service itself"
    if pid in _ancestors(own):
        return "a parent of the service"
    if pid == os.getpgrp():
        return "the leader of the service's process group"
    # A launched job has its own session in any case; the service's workers share the service's session.
    if own in _ancestors(pid) and os.getsid(pid) == os.getsid(0):
        return "a child of the service"
    return ""


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the ids of a process's ancestors, up to init."""
    while pid > _INIT:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        pid = int(text.rpartition(")")[2].split()[1])
        yield pid
