"""Caches of earlier rows, and of rule configs with their states, of the runs that this process evaluated last.

The database is authoritative. Every claim increments the run's epoch, as does every change of its rule configs. So
the state committed under one epoch equals the database's if the next claim has the next epoch: no other worker
has claimed the run since, and no rule config has changed. Anything else is a miss.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from watchstep_rules.engine.rule_inputs import History, Lookback
from watchstep_services.service.judging import Loaded

_ROWS = 2_000_000
_BINS_OF_ROW = 40
"""Histogram bins that take as much memory as a row."""


class HistoryCache:
    """Row caches of the runs that this process evaluated last. Thread-safe.

    An entry is valid only for its cursor and lookback; anything else is a miss.

    Args:
        rows: limit of rows of all histories, about 400 bytes each; a tensor's description counts as two rows. Beyond it the least
            recently used are dropped.
    """

    def __init__(self, rows: int = _ROWS) -> None:
        self._most = rows
        self._rows = 0
        self._entries: OrderedDict[tuple[int, str], tuple[str, Lookback, History]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, run: tuple[int, str], cursor: str, lookback: Lookback) -> History | None:
        """The history of a (run id, attempt) at a cursor."""
        with self._lock:
            entry = self._entries.get(run)
            if entry is None or entry[:2] != (cursor, lookback):
                return None
            self._entries.move_to_end(run)
            return entry[2]

    def put(self, run: tuple[int, str], cursor: str, lookback: Lookback, history: History) -> None:
        """Cache a history."""
        with self._lock:
            before = self._entries.pop(run, None)
            self._rows += _size(history) - (_size(before[2]) if before else 0)
            self._entries[run] = (cursor, lookback, history)
            while self._rows > self._most and self._entries:
                _, (_, _, dropped) = self._entries.popitem(last=False)
                self._rows -= _size(dropped)

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._entries.clear()
            self._rows = 0


def _size(history: History) -> int:
    bins = history.block.statistics.histogram.size
    return max(1, len(history.block) + bins // _BINS_OF_ROW + 2 * len(history.block.catalogue))


_STATE_BYTES = 256 * 1024 * 1024
_PARSED = 4
"""Approximate size of a parsed state, as a multiple of its text."""

_ENTRY_BYTES = 4096


class RuleStateCache:
    """Rule configs and their states of the runs that this process evaluated last. Thread-safe.

    Args:
        most_bytes: limit of the approximate memory, some 20 KB for an ordinary attempt; beyond it the least recently used are dropped.
    """

    def __init__(self, most_bytes: int = _STATE_BYTES) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[int, str], tuple[int, Sequence[Loaded], int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, run: tuple[int, str], epoch: int) -> Sequence[Loaded] | None:
        """The current configs and states of a (run id, attempt) claimed with an epoch; None for a miss."""
        with self._lock:
            entry = self._entries.get(run)
            if entry is None or entry[0] + 1 != epoch:
                return None
            self._entries.move_to_end(run)
            return entry[1]

    def put(self, run: tuple[int, str], epoch: int, committed: Sequence[Loaded]) -> None:
        """Cache the configs and states committed under an epoch."""
        size = _ENTRY_BYTES + sum((1 + _PARSED) * sys.getsizeof(loaded.state) for loaded in committed)
        with self._lock:
            before = self._entries.pop(run, None)
            self._bytes += size - (before[2] if before else 0)
            self._entries[run] = (epoch, committed, size)
            while self._bytes > self._most and self._entries:
                _, (_, _, dropped) = self._entries.popitem(last=False)
                self._bytes -= dropped

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0


_PICTURES = 64
_PICTURE_SECONDS = 120.0
"""A picture also shows the steps after the alert, so it is drawn again after this time."""


class PictureCache:
    """Pictures of alerts that this process drew last, each some tens of kilobytes. Thread-safe.

    Args:
        pictures: limit of pictures.
        seconds: how long a picture is used.
    """

    def __init__(self, pictures: int = _PICTURES, seconds: float = _PICTURE_SECONDS) -> None:
        self._most, self._seconds = pictures, seconds
        self._entries: OrderedDict[Hashable, tuple[float, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> bytes | None:
        """A picture; None if it is not cached, or too old."""
        with self._lock:
            ends, picture = self._entries.get(key, (0.0, b""))
        return picture if time.monotonic() < ends else None

    def put(self, key: Hashable, picture: bytes) -> None:
        """Cache a picture."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = (time.monotonic() + self._seconds, picture)
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)
