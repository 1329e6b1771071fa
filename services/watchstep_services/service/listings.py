"""Caches of listings: refused documents, and the duration of each run's last listing.

Objects never change, so a refused document is not read again at once. A run with a slow listing is listed less often.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from watchstep_services.core.settings import nanoseconds

MOST = 10_000
"""Limit of entries, over all runs; the least recently used are dropped."""
AGAIN_SECONDS = 600.0
"""Time after which a refused document is read again, because it may have been repaired without a change of size."""


class RefusedDocuments:
    """Documents that this process has refused, by run, key and size. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._refused: OrderedDict[tuple[int, str], tuple[int, str, float]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, run_id: int, key: str, size: int) -> str | None:
        """Why a document was refused; None if it is to be read."""
        with self._lock:
            refused = self._refused.get((run_id, key))
            if refused is None or refused[0] != size or time.monotonic() >= refused[2]:
                return None
            self._refused.move_to_end((run_id, key))
            return refused[1]

    def put(self, run_id: int, key: str, size: int, problem: str) -> None:
        """Record that a document of this size was refused."""
        with self._lock:
            self._refused[run_id, key] = (size, problem[:500], time.monotonic() + AGAIN_SECONDS)
            self._refused.move_to_end((run_id, key))
            while len(self._refused) > self._most:
                self._refused.popitem(last=False)


_PAUSE = 20.0
"""Pause before the next listing as a multiple of the last one's duration, so that it takes a twentieth of a thread at most."""
_SHORT_SECONDS = 0.25
"""Shorter listings have no pause."""
_LONGEST_SECONDS = 600.0


class ListingTimes:
    """Durations of this process's last listing of each run. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._seconds: OrderedDict[int, float] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, run_id: int, seconds: float) -> None:
        """Record how long a listing took, in seconds."""
        with self._lock:
            self._seconds[run_id] = seconds
            self._seconds.move_to_end(run_id)
            while len(self._seconds) > self._most:
                self._seconds.popitem(last=False)

    def pause_ns(self, run_id: int) -> int:
        """Time until a run may be listed again, in nanoseconds; 0 if its last listing was short."""
        with self._lock:
            seconds = self._seconds.get(run_id, 0.0)
        if seconds < _SHORT_SECONDS:
            return 0
        return nanoseconds(min(_PAUSE * seconds, _LONGEST_SECONDS))
