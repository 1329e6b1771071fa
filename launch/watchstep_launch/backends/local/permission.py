"""Which processes of this machine the service may signal: recorded jobs, and never the service itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from watchstep.errors import ConfigError, NotFoundError
from watchstep.platform.process import ProcessIdentity, default_folder, trusted_record, user_of

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
