"""Encoded segments on their way to the store, in order: the newest in memory, older ones on disk where memory is short."""

from __future__ import annotations

import threading
from collections import deque

from watchstep.capture.health import Health
from watchstep.capture.outgoing import Outgoing, Place
from watchstep.capture.spill import Spill
from watchstep.documents import EndDocument
from watchstep.layout import WriterId


class Backlog:
    """What is not on the store yet. Thread-safe; the lock is never held while the store is asked.

    What lies on disk is always older than what is in memory, so that taking from the disk first keeps the order. Where
    neither has room nothing more is taken from the queue, and the queue drops what is newest, before it has a number:
    numbers stay contiguous.
    """

    def __init__(self, limit: int, spill: Spill, health: Health) -> None:
        self._limit = limit
        self._spill = spill
        self._health = health
        self._lock = threading.Lock()
        self._memory: deque[Outgoing] = deque()
        self._bytes = 0
        self._segments = 0
        self._sealed = False

    @property
    def full(self) -> bool:
        """Whether there is no room for more."""
        with self._lock:
            return self._bytes >= self._limit or self._sealed

    @property
    def empty(self) -> bool:
        """Whether everything lies on the store, and nothing on disk."""
        with self._lock:
            return not self._memory and not len(self._spill)

    @property
    def segments(self) -> int:
        """How many segments have a number and were not dropped."""
        with self._lock:
            return self._segments

    def add(self, first: int, last: int, rows: int, data: bytes) -> None:
        """A segment of these steps: it gets the next number."""
        with self._lock:
            self._memory.append(Outgoing(Place(self._segments, first, last, rows), data))
            self._segments += 1
            self._bytes += len(data)
            self._health.reached("most_backlog_bytes", self._bytes)
            self._relieve(self._limit)

    def relieve(self) -> None:
        """Put all that is in memory on disk, as far as there is room."""
        with self._lock:
            if not self._sealed:
                self._relieve(1)

    def _relieve(self, limit: int) -> None:
        while self._memory and self._bytes >= limit and self._spill.add(self._memory[0]):
            self._bytes -= len(self._memory.popleft().data)

    def head(self) -> Outgoing | None:
        """The oldest object; None where there is none, or it is no longer this process that uploads."""
        with self._lock:
            if self._sealed:
                return None
            return self._spill.head() or (self._memory[0] if self._memory else None)

    def remove(self, head: Outgoing) -> bool:
        """The head lies on the store now, wherever it has gone meanwhile; False where it was given up before."""
        with self._lock:
            if self._sealed:
                return False
            if self._memory and self._memory[0].place.seq == head.place.seq:
                self._bytes -= len(self._memory.popleft().data)
                return True
            return self._spill.remove(head.place.seq)

    def claimed(self, writer: WriterId) -> None:
        """This is the writer of all that is here and comes."""
        with self._lock:
            self._spill.claimed(writer)

    def seal(self) -> None:
        """Put everything on disk: nothing more is uploaded by this process. What does not fit is dropped and counted.

        Only the last are dropped, so that those that are kept have no gap.
        """
        with self._lock:
            self._sealed = self._spill.ending = True
            room = True
            while self._memory:
                item = self._memory.popleft()
                self._bytes -= len(item.data)
                room = room and self._spill.add(item)
                if not room:
                    self._drop(item.place)
            if waiting := len(self._spill):
                self._health.count("unwritten_objects", waiting)
                self._health.count("spilled_rows", self._spill.rows)

    def _drop(self, place: Place) -> None:
        self._health.count("dropped_objects")
        self._health.count("dropped_rows", place.rows)
        self._segments = min(self._segments, place.seq)

    def leave(self, end: EndDocument | None) -> str:
        """Let go of the spill folder, with how the worker ended in it where that is not on the store; its path."""
        with self._lock:
            if end is not None:
                self._spill.add_end(end)
            elif not len(self._spill):
                self._spill.close()
            return self._spill.leave()

    def forget(self) -> None:
        """This is a forked child: all this is its parent's."""
        self._spill.forget()
