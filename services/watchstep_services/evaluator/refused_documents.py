"""Documents that were read and refused: objects never change, so listings need not read them again at once."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

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
