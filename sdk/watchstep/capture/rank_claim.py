"""The claim of a rank: on one machine, one process records a rank of an attempt when a program is recorded without code changes.

A claim is a locked file. The file remains, so that another process of the attempt finds that something was recorded.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Callable

from watchstep.capture.identity import ATTEMPT
from watchstep.platform.folders import PrivateFolder

_log = logging.getLogger("watchstep")

PROGRAM_PROCESS = "WATCHSTEP_PROGRAM_PROCESS"
"""Id of the process that `watchstep run` becomes, set by it: only this one outlives the others, and can say that nothing was recorded."""

_SUFFIX = ".claim"

_held_by: list[int] = []
"""The process that has claimed its rank: its forks inherit the list, and not the claim."""


def holds_claim() -> bool:
    """Return whether this process has claimed its rank."""
    return os.getpid() in _held_by


def claim_rank(report: Callable[[OSError], None]) -> bool:
    """Claim this rank of this attempt on this machine for the lifetime of the process.

    Args:
        report: called with errors of making the claim in its preferred folder. Without a claim, the rank records
            anyway: recording a second process of the rank too is better than no recording.

    Returns:
        Whether this process records; False if another process of the rank does.
    """
    rank = os.environ.get("RANK") or "0"
    try:
        folder = PrivateFolder.open()
        if folder.refused:
            report(PermissionError(f"{folder.refused}; using {folder.path}"))
        try:
            handle = folder.open_file(_name(rank))
        finally:
            folder.close()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            _log.warning("watchstep: not recording: another process records rank %s of this attempt", rank)
            return False
    except OSError as error:
        report(error)
    else:
        _held_by[:] = [os.getpid()]
    return True


def note_recorded() -> None:
    """Note that this process records, without a claim: the program does so itself. Only the end of `watchstep run` reads it."""
    if PROGRAM_PROCESS not in os.environ:
        return
    try:
        folder = PrivateFolder.open()
        try:
            os.close(folder.open_file(_name(f"{os.environ.get('RANK') or '0'}-own")))
        finally:
            folder.close()
    except OSError as error:
        _log.debug("watchstep: the recording is not noted: %s", error)


def is_recorded() -> bool:
    """Return whether a process of this attempt on this machine records, or has recorded.

    Raises:
        OSError: the private folder cannot be read.
    """
    folder = PrivateFolder.open()
    try:
        prefix = _name("").removesuffix(_SUFFIX)
        names = os.listdir(folder.descriptor)  # noqa: PTH208 - a directory that was checked, not a path
        return any(name.startswith(prefix) and name.endswith(_SUFFIX) for name in names)
    finally:
        folder.close()


def _name(rank: str) -> str:
    """Return the name of the file of a rank of this attempt."""
    attempt = os.environ.get(ATTEMPT) or "none"
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{attempt}-{rank}")[:200] + _SUFFIX
