"""The recorder's own work on the training thread, as time and as calls in progress."""

from __future__ import annotations

import threading
import time


class _OwnWork(threading.local):
    """Calls of the recorder in this thread.

    Attributes:
        depth: Number of calls in progress.
        seconds: Time in all calls so far that `enter` and `leave` enclose.
    """

    depth = 0
    seconds = 0.0
    _began = 0.0

    def so_far(self) -> float:
        """Return the time in all calls so far, including the one in progress."""
        return self.seconds + (time.perf_counter() - self._began if self.depth else 0.0)

    def enter(self) -> None:
        """Begin a call, whose time counts as recording if it is not within another."""
        if not self.depth:
            self._began = time.perf_counter()
        self.depth += 1

    def leave(self) -> None:
        """End a call."""
        self.depth -= 1
        if not self.depth:
            self.seconds += time.perf_counter() - self._began


own_work = _OwnWork()
"""While its ``depth`` is not zero, operations are the recorder's own and not the program's. A tracer leaves them out."""
