"""Records of local jobs in a folder, and who may signal their processes."""

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

_KEPT_SECONDS = 30 * 86400.0


@dataclass(frozen=True)
class Records:
    """A folder of records: ``PID-TICKS-BOOT.json`` for each job, and the same with ``.exit`` once it has ended."""

    folder: Path

    def new_log(self, name: str) -> Path:
        """A log of a job's own."""
        named = re.sub(r"[^a-zA-Z0-9._-]", "-", name)[:63] or "job"
        return self.folder / f"{named}-{secrets.token_hex(4)}.log"

    def exit_of(self, identity: ProcessIdentity) -> Path:
        """Where the supervisor writes how a process ended."""
        return self._began(identity).with_suffix(".exit")

    def prepare(self) -> None:
        """Make the folder, and remove the records of jobs that ended a month ago.

        Raises:
            SubmissionRejectedError: the folder cannot be used.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            oldest = time.time() - _KEPT_SECONDS
            for ended in self.folder.glob("*.exit"):
                if ended.stat().st_mtime < oldest:
                    self._forget(ended)
            for began in self.folder.glob(
                "*.json"
            ):  # of processes that no supervisor started: nobody writes their end
                if began.stat().st_mtime < oldest and not self._may_run(began):
                    self._forget(began.with_suffix(".exit"))
        except FileNotFoundError:
            pass  # another launcher forgot it just now
        except OSError as error:
            raise SubmissionRejectedError(
                f"jobs folder {self.folder}: cannot be used ({error.strerror})",
                f"name a folder that you may write to, by Local(folder=…) or {FOLDER}",
            ) from error

    def keep(self, identity: ProcessIdentity, log: Path) -> None:
        """Write down that a job began, before it can be seen to have ended.

        Raises:
            OSError: the folder cannot be written.
        """
        ProcessRecord(identity, user_of(identity.pid), str(log)).write(self.folder)

    def is_kept(self, identity: ProcessIdentity) -> bool:
        """Whether a job was started with this folder."""
        return self.log_of(identity) is not None

    def log_of(self, identity: ProcessIdentity) -> str | None:
        """The log of a job that was started with this folder."""
        try:
            return _read(self._began(identity)).log or None
        except (OSError, ValueError):
            return None

    def kept(self) -> Iterator[tuple[ProcessIdentity, Path]]:
        """The jobs of this folder that are not known to have ended, with their logs."""
        for place in sorted(self.folder.glob("*.json")):
            if place.with_suffix(".exit").exists():
                continue
            try:
                record = _read(place)
            except (OSError, ValueError):
                continue  # removed just now, or not a record
            if record.log:
                yield record.identity, Path(record.log)

    def named(self, name: str) -> tuple[ProcessIdentity, Path] | None:
        """The job that was started under a name with this folder; None where none was: its supervisor ends what is not written down."""
        for place in sorted(self.folder.glob("*.json")):
            try:
                record = _read(place)
            except (OSError, ValueError):
                continue  # removed just now, or not a record
            if Path(record.log).name.rpartition("-")[0] == name:
                return record.identity, Path(record.log)
        return None

    def ending(self, identity: ProcessIdentity) -> JobStatus:
        """How a process that runs no more ended.

        The supervisor writes it before it lets the process go, so it stands there unless the supervisor died first.
        """
        for last_look in (False, True):
            try:
                return JobStatus("ended", int(self.exit_of(identity).read_text(encoding="ascii")))
            except FileNotFoundError:
                pass
            except ValueError:
                break
            if not last_look and _is_held(identity):
                return JobStatus("running", detail="it is ending")
        return JobStatus("vanished", detail="its supervisor was ended before it: nobody knows its exit code")

    def _began(self, identity: ProcessIdentity) -> Path:
        return self.folder / file_name(identity)

    def _may_run(self, began: Path) -> bool:
        try:
            return _read(began).identity.is_running()
        except FileNotFoundError:
            return True  # another launcher removed it just now
        except ValueError:
            return False

    def _forget(self, ended: Path) -> None:
        began = ended.with_suffix(".json")
        try:
            log = Path(_read(began).log)
            if log.parent == self.folder:
                log.unlink(missing_ok=True)
        except (OSError, ValueError):
            pass
        began.unlink(missing_ok=True)
        ended.unlink(missing_ok=True)


def _is_held(identity: ProcessIdentity) -> bool:
    """Whether the process has ended and its supervisor has not let it go yet."""
    try:
        return ProcessIdentity.of(identity.pid) == identity
    except NotFoundError:
        return False


def _read(place: Path) -> ProcessRecord:
    return ProcessRecord.parse(place.read_text(encoding="utf-8"))


_INIT = 1


def check_may_signal(identity: ProcessIdentity, records: Path) -> None:
    """Check that a running process is a job that a launcher recorded, and not one of the service's own processes.

    Args:
        identity: of the process. It is not signalled by anybody while it does not run, so that is no error.
        records: folder of job records, beside those of this user and of the process's user.

    Raises:
        ConfigError: it must not be signalled.
    """
    # Another container's process 1 may well be a job. It does not run here, and is not signalled here.
    if identity.pid < _INIT or (identity.pid == _INIT and identity.is_running()):
        raise ConfigError(
            f"process {identity.pid}: is not a job", "bind the process that trains, by its process id"
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
            f"process {identity.pid}: is {part}, which the service never signals",
            "run the service outside the job's process tree, with 'watchstep serve' or as a system service",
        )
    try:
        trusted_record(identity, uid, [records, default_folder()])
    except ConfigError:
        if identity.is_running():
            raise


def _part_of_service(pid: int) -> str:
    """What a process is to this one, for people; empty where it is not part of the service."""
    own = os.getpid()
    if pid == own:
        return "the service itself"
    if pid in _ancestors(own):
        return "a parent of the service"
    if pid == os.getpgrp():
        return "the leader of the service's process group"
    # A launched job has a session of its own, whoever launched it; the service's workers share its session.
    if own in _ancestors(pid) and os.getsid(pid) == os.getsid(0):
        return "a child of the service"
    return ""


def _ancestors(pid: int) -> Iterator[int]:
    """The ids of a process's parents, up to init."""
    while pid > _INIT:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        pid = int(text.rpartition(")")[2].split()[1])
        yield pid
