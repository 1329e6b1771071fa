"""Hooks of programs that `watchstep run` starts unmodified: one per rank and training on a machine, created at the first update."""

from __future__ import annotations

import logging

from watchstep.capture.rank_claim import claim_rank
from watchstep.capture.shutdown.ending import live
from watchstep.hook import Hook

_log = logging.getLogger("watchstep")


def start_hook(*, later_from: int | None = None) -> Hook | None:
    """Create the hook of this process.

    Args:
        later_from: the first step of a later training of this process, which has claimed its rank.

    Returns:
        An open hook; None if the program records itself, or another process records this rank. Faults of the
        hook's start are logged, because the program did not request a recorder and must continue without one.
    """
    try:
        if live():
            return None
        faults: list[OSError] = []
        if later_from is None and not claim_rank(faults.append):
            return None
        hook = Hook(first_step=later_from)
        for fault in faults:
            hook._health.fault("claim", fault)  # noqa: SLF001 - part of the hook's own package
    except Exception as error:  # noqa: BLE001 - no fault may end the program
        _log.error("watchstep: not recording: %s", error)
        return None
    return hook
