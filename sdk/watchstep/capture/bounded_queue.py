"""The way from the training thread to the writer: bounded by bytes, never blocking."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from watchstep.capture.record import Record

_URGENT_SECONDS = 5.0


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


class BoundedQueue:
    """Finished steps up to a number of bytes. One producer, one consumer.

    Without a lock: a signal that comes while the training thread hands something over must find none held.

    Attributes:
        wake: set when the consumer should look at once.
        pressing: what is in here shall be written at once. Set by the producer, taken back by the consumer.
        urgent_at: when something urgent was last handed over, by the monotonic clock.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[tuple[int, FinishedStep]] = deque()
        self._offered = 0  # bytes; written by the producer alone
        self._taken = 0  # bytes; written by the consumer alone
        self.wake = threading.Event()
        self.pressing = False
        self.urgent_at = float("-inf")

    def is_urgent(self) -> bool:
        """Whether something urgent was handed over a moment ago: a stop may follow."""
        return time.monotonic() - self.urgent_at < _URGENT_SECONDS

    @property
    def room(self) -> int:
        """Bytes that are left."""
        return self._limit - (self._offered - self._taken)

    def offer(self, item: FinishedStep, *, urgent: bool = False) -> bool:
        """Hand an item over; False, and nothing kept, where it would go over the bound."""
        size = item.bytes
        fits = size <= self.room
        if fits:
            self._offered += size
            self._items.append((size, item))
        if urgent:
            self.urgent_at = time.monotonic()
        if urgent or not fits:
            self.press()
        return fits

    def press(self) -> None:
        """Have the consumer write at once."""
        self.pressing = True
        self.wake.set()

    def take(self) -> FinishedStep | None:
        """The oldest item; None where there is none."""
        try:
            size, item = self._items.popleft()
        except IndexError:
            return None
        self._taken += size
        return item
