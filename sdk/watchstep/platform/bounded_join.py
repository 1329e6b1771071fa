"""Waiting for a thread that may hang in a request, until a deadline that may be brought forward meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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
