"""What listings of runs remember: documents that were refused, and how long a listing took.

Objects never change, so a refused document is not read again at once. A run whose listing takes long is listed less often.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from watchstep_services.core.settings import nanoseconds

MOST = 10_000
"""Documents that are remembered, of all runs; the one that was asked for longest ago is forgotten first."""
AGAIN_SECONDS = 600.0
"""After so long one is read again: a person may have mended it without a change of its size."""


class RefusedDocuments:
    """What this process has refused, by run, key and size. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._refused: OrderedDict[tuple[int, str], tuple[int, str, float]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, run_id: int, key: str, size: int) -> str | None:
        """Why a document was refused; None where it is to be read."""
        with self._lock:
            refused = self._refused.get((run_id, key))
            if refused is None or refused[0] != size or time.monotonic() >= refused[2]:
                return None
            self._refused.move_to_end((run_id, key))
            return refused[1]

    def put(self, run_id: int, key: str, size: int, problem: str) -> None:
        """Note that a document of this size was refused."""
        with self._lock:
            self._refused[run_id, key] = (size, problem[:500], time.monotonic() + AGAIN_SECONDS)
            self._refused.move_to_end((run_id, key))
            while len(self._refused) > self._most:
                self._refused.popitem(last=False)


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
