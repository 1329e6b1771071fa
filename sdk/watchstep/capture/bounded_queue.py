"""The way from the training thread to the writer: bounded by bytes, never blocking."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from watchstep.capture.record import Record
from watchstep.layout import SnapshotKey


@dataclass(frozen=True)
class FinishedStep:
    """All that was recorded of one step."""

    step: int
    records: tuple[Record, ...]

    @property
    def bytes(self) -> int:
        """About how much memory it holds."""
        return sum(record.bytes for record in self.records)

    @property
    def rows(self) -> int:
        """Rows of statistics in it."""
        return sum(len(record.group.tensors) for record in self.records)


@dataclass(frozen=True)
class PendingSnapshot:
    """An encoded snapshot; the writer fills in the attempt."""

    key: SnapshotKey
    data: bytes

    @property
    def bytes(self) -> int:
        """Memory that it holds."""
        return len(self.data)


Item = FinishedStep | PendingSnapshot


class BoundedQueue:
    """Items up to a number of bytes. One producer, one consumer.

    Attributes:
        wake: set when the consumer should look at once.
        urgent_at: when something urgent was last handed over, by the monotonic clock.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._items: list[Item] = []
        self._bytes = 0
        self.wake = threading.Event()
        self.urgent_at = float("-inf")

    def offer(self, item: Item, *, urgent: bool = False) -> bool:
        """Hand an item over; False, and nothing kept, where it would go over the bound."""
        size = item.bytes
        with self._lock:
            fits = self._bytes + size <= self._limit
            if fits:
                self._items.append(item)
                self._bytes += size
        if urgent:
            self.urgent_at = time.monotonic()
        if urgent or not fits:
            self.wake.set()
        return fits

    def take(self) -> list[Item]:
        """All items so far."""
        with self._lock:
            items, self._items, self._bytes = self._items, [], 0
        return items
