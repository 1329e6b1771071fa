"""How long listings of runs took: a run whose listing takes long is listed the more rarely."""

from __future__ import annotations

import threading
from collections import OrderedDict

from watchstep_services.settings import nanoseconds

MOST = 10_000
"""Runs that are remembered; the one that was listed longest ago is forgotten first."""
_PAUSE = 20.0
"""A run is listed again after so many times as long as its last listing took, so that it takes a twentieth of a thread at the most."""
_SHORT_SECONDS = 0.25
"""A shorter listing puts no other off."""
_LONGEST_SECONDS = 600.0


class ListingTimes:
    """How long this process's last listing of each run took. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._seconds: OrderedDict[int, float] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, run_id: int, seconds: float) -> None:
        """Note how long a listing took, in seconds."""
        with self._lock:
            self._seconds[run_id] = seconds
            self._seconds.move_to_end(run_id)
            while len(self._seconds) > self._most:
                self._seconds.popitem(last=False)

    def pause_ns(self, run_id: int) -> int:
        """How long a run is not listed again, in nanoseconds; 0 where its last listing was short."""
        with self._lock:
            seconds = self._seconds.get(run_id, 0.0)
        if seconds < _SHORT_SECONDS:
            return 0
        return nanoseconds(min(_PAUSE * seconds, _LONGEST_SECONDS))
