"""Encoded segments on their way to the store, in order: the newest in memory, older ones on disk where memory is short."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace

from watchstep.capture.health import RecorderHealth
from watchstep.capture.upload.outgoing import Doubt, Outgoing, SegmentPlace
from watchstep.capture.upload.spill import Spill
from watchstep.format.documents import EndDocument
from watchstep.format.layout import WriterId


class Backlog:
    """What is not on the store yet. Thread-safe; the lock is never held while the store is asked.

    What lies on disk is always older than what is in memory, so that taking from the disk first keeps the order. Where
    neither has room nothing more is taken from the queue, and the queue drops what is newest, before it has a number:
    numbers stay contiguous.
    """

    def __init__(self, limit: int, spill: Spill, health: RecorderHealth) -> None:
        self._limit = limit
        self._spill = spill
        self._health = health
        self._lock = threading.Lock()
        self._memory: deque[Outgoing] = deque()
        self._bytes = 0
        self._segments = 0
        self._handing = False
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

    @property
    def oldest(self) -> int:
        """The number of the oldest that is not on the store; that of the next where all are."""
        with self._lock:
            return self._memory[0].place.seq if self._memory else self._segments

    @property
    def base(self) -> int:
        """The number of the segment that is the first of this process' own writer."""
        with self._lock:
            return self._spill.about.base or 0

    @property
    def doubt(self) -> Doubt | None:
        """The oldest segments, where they may be on the store already, by the node's writer."""
        with self._lock:
            return None if self._sealed else self._spill.about.doubt

    def hand_over(self) -> bool:
        """From now on another process uploads: nothing goes to disk. False where something waits there."""
        with self._lock:
            self._handing = not len(self._spill) and not self._sealed and self._spill.about.doubt is None
            return self._handing

    def after(self, number: int, limit: int) -> list[Outgoing]:
        """Segments in memory from a number on: one at least, where there is any, and further ones up to so many bytes."""
        found: list[Outgoing] = []
        with self._lock:
            for item in self._memory:
                if item.place.seq >= number:
                    limit -= len(item.data)
                    if found and limit < 0:
                        break
                    found.append(item)
        return found

    def acknowledge(self, numbers: tuple[int, ...]) -> None:
        """The oldest segments, with these numbers, lie on the store."""
        with self._lock:
            while self._memory and self._memory[0].place.seq in numbers:
                item = self._memory.popleft()
                self._bytes -= len(item.data)
                self._health.count("rows", item.place.rows)

    def take_back(self, doubt: Doubt | None, written: int) -> None:
        """From now on this process uploads again, under its own writer.

        Args:
            doubt: what must be settled before.
            written: how many segments of its own writer are on the store.
        """
        with self._lock:
            if self._handing:
                self._handing = False
                self._spill.describe(replace(self._spill.about, base=None, written=written, doubt=doubt))

    def doubted(self) -> list[Outgoing]:
        """The segments that are in doubt."""
        with self._lock:
            doubt = self._spill.about.doubt
            if doubt is None or self._sealed:
                return []
            last = max(doubt.numbers)
            held = self._spill.oldest(last)
            return held + [item for item in self._memory if item.place.seq <= last]

    def settled(self, contained: tuple[int, ...]) -> None:
        """Of those in doubt these are on the store; nothing is in doubt any more."""
        with self._lock:
            if self._sealed:
                return
            for number in contained:
                head = self._spill.waiting
                if head is not None and head.seq == number:
                    rows = head.rows
                    self._spill.remove(number)
                elif head is None and self._memory and self._memory[0].place.seq == number:
                    item = self._memory.popleft()
                    self._bytes -= len(item.data)
                    rows = item.place.rows
                else:
                    continue
                self._health.count("rows", rows)
            about = self._spill.about
            if about.base is None:
                head = self._spill.waiting
                following = self._memory[0].place.seq if self._memory else self._segments
                base = (head.seq if head else following) - about.written
                self._spill.describe(replace(about, base=base, doubt=None))

    def add(self, first: int, last: int, rows: int, data: bytes) -> None:
        """A segment of these steps: it gets the next number."""
        with self._lock:
            self._memory.append(Outgoing(SegmentPlace(self._segments, first, last, rows), data))
            self._segments += 1
            self._bytes += len(data)
            self._health.reached("most_backlog_bytes", self._bytes)
            if not self._handing:
                self._relieve(self._limit)

    def relieve(self) -> None:
        """Put all that is in memory on disk, as far as there is room."""
        with self._lock:
            if not self._sealed and not self._handing:
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
            self._spill.describe(replace(self._spill.about, writer=writer))

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

    def _drop(self, place: SegmentPlace) -> None:
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
