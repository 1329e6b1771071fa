"""For how long this process has been there."""

from __future__ import annotations

import os
import sys
import time

from watchstep.process_identity import ProcessIdentity

_told: list[int] = []


def seconds_before_recording() -> float | None:
    """Seconds since the process began; None where it was not begun for this training.

    That is so for all but the first recording of a process, and where a person types: in a notebook's kernel and at a
    prompt. On other systems than Linux it is not known.
    """
    if os.getpid() in _told or sys.platform != "linux":
        return None
    _told[:] = [os.getpid()]
    if "ipykernel" in sys.modules or sys.flags.interactive or hasattr(sys, "ps1"):
        return None
    started = ProcessIdentity.of(os.getpid()).start_ticks / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
