"""Earlier rows of the runs that this process judged last, kept so that they need not be read again."""

from __future__ import annotations

import threading
from collections import OrderedDict

from watchstep_rules.judging.history import History
from watchstep_rules.judging.reach import Reach

_ENTRIES = 64


class HistoryCache:
    """Histories of the runs that this process judged last. Thread-safe.

    An entry counts only for the cursor and lookback that it was made for; anything else is a miss.
    """

    def __init__(self, entries: int = _ENTRIES) -> None:
        self._entries = entries
        self._held: OrderedDict[tuple[int, str], tuple[str, Reach, History]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, run: tuple[int, str], cursor: str, lookback: Reach) -> History | None:
        """The history of a (run id, attempt) at a cursor."""
        with self._lock:
            held = self._held.get(run)
            if held is None or held[:2] != (cursor, lookback):
                return None
            self._held.move_to_end(run)
            return held[2]

    def put(self, run: tuple[int, str], cursor: str, lookback: Reach, history: History) -> None:
        """Keep a history."""
        with self._lock:
            self._held[run] = (cursor, lookback, history)
            self._held.move_to_end(run)
            while len(self._held) > self._entries:
                self._held.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._held.clear()
