"""The claim of a rank: on one machine, one process records a rank of an attempt when a program is recorded without code changes."""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Callable

from watchstep.capture.identity import ATTEMPT
from watchstep.platform.folders import PrivateFolder

_log = logging.getLogger("watchstep")


def claim_rank(report: Callable[[OSError], None]) -> bool:
    """Claim this rank of this attempt on this machine for the lifetime of the process.

    Args:
        report: called with errors of making the claim in its preferred folder. Without a claim, the rank records
            anyway: recording a second process of the rank too is better than no recording.

    Returns:
        Whether this process records; False if another process of the rank does.
    """
    attempt, rank = os.environ.get(ATTEMPT) or "none", os.environ.get("RANK") or "0"
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{attempt}-{rank}")[:200] + ".claim"
    try:
        folder = PrivateFolder.open()
        if folder.refused:
            report(PermissionError(f"{folder.refused}; using {folder.path}"))
        try:
            handle = folder.open_file(name)
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
    return True
