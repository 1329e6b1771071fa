"""From finished steps to encoded segments, and the segments that wait for the store: the newest in memory, older ones on disk if memory is short."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace

from watchstep.capture.health import RecorderHealth
from watchstep.capture.record import FinishedStep, join, merge_repeats
from watchstep.capture.upload.outgoing import Doubt, Outgoing, SegmentPlace
from watchstep.capture.upload.spill import Spill
from watchstep.format.block import Block, concatenate
from watchstep.format.documents import EndDocument
from watchstep.format.layout import WriterId
from watchstep.format.segment import catalogue_bytes, encode
from watchstep.format.tensors import MAX_WORD_BYTES, TensorInfo


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
        later: list[Outgoing] = []
        with self._lock:
            for item in self._memory:
                if item.place.seq >= number:
                    limit -= len(item.data)
                    if later and limit < 0:
                        break
                    later.append(item)
        return later

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
            doubted = self._spill.oldest(last)
            return doubted + [item for item in self._memory if item.place.seq <= last]

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


Catalogue = tuple[TensorInfo, ...]

_CATALOGUES = 4
"""The same few come again and again: of losses alone, of all layers, with what is sampled of the system beside them. To
encode one takes 16 µs a tensor."""


@dataclass(frozen=True)
class _Steps:
    """Some steps as one block, which takes few objects of Python's however many records they had."""

    first: int
    last: int
    number: int
    rows: int
    block: Block


_ROW_BYTES = 60
"""Of a row's step, mode, worker, time, tensor and placement."""


class SegmentEncoder:
    """Takes steps in as they come, and makes one segment of them; keeps the last encoded catalogues, for they come again.

    Records are objects of Python's. Those that wait for the next segment are seen by each run of the collector of cycles, and
    after some ten thousand it looks at all objects of the process, which stops training for a tenth of a second and more. So
    they are made into arrays a few steps at a time.

    Attributes:
        rows: that were taken in and wait for their segment.
        bytes: of their arrays; making the segment takes about twice as much again.
    """

    def __init__(self, backlog: Backlog, health: RecorderHealth) -> None:
        self._backlog = backlog
        self._health = health
        self._catalogues: deque[tuple[Catalogue, Catalogue, bytes]] = deque(maxlen=_CATALOGUES)
        self._taken: list[_Steps] = []
        self.rows = 0
        self.bytes = 0

    def take_in(self, steps: list[FinishedStep]) -> None:
        """Make arrays of some steps, for the next segment. A step of which none can be made is dropped and counted."""
        try:
            block = join([record for step in steps for record in step.records])
        except Exception as error:  # noqa: BLE001 - counted; other steps may well be taken in
            if len(steps) > 1:
                for step in steps:
                    self.take_in([step])
                return
            self._drop(len(steps), sum(step.rows for step in steps), error)
            return
        if len(block):
            rows = sum(step.rows for step in steps)
            self._taken.append(_Steps(steps[0].step, steps[-1].step, len(steps), rows, block))
            self.rows += rows
            self.bytes += block.statistics.bytes + _ROW_BYTES * len(block)

    def encode(self) -> None:
        """Put a segment of what was taken in into the backlog. Steps that cannot be encoded are dropped and counted."""
        taken = self._take_out()
        if taken:
            self._encode(taken)

    def drop_rest(self) -> None:
        """Count what was taken in and cannot be written any more."""
        for steps in self._take_out():
            self._drop(steps.number, steps.rows)

    def _take_out(self) -> list[_Steps]:
        taken, self._taken, self.rows, self.bytes = self._taken, [], 0, 0
        return taken

    def _encode(self, taken: list[_Steps]) -> None:
        try:
            block = merge_repeats(concatenate([steps.block for steps in taken]))
            catalogue, packed = self._encoded(block.catalogue)
            data = encode(replace(block, catalogue=catalogue), packed)
        except Exception as error:  # noqa: BLE001 - counted; other steps may well encode
            if len(taken) > 1:
                for steps in taken:
                    self._encode([steps])
                return
            self._drop(taken[0].number, taken[0].rows, error)
            return
        self._backlog.add(taken[0].first, taken[-1].last, len(block), data)

    def _drop(self, steps: int, rows: int, error: Exception | None = None) -> None:
        if error is not None:
            self._health.fault("encoding", error)
        self._health.count("dropped_rows", rows)
        self._health.count("dropped_steps", steps)

    def _encoded(self, catalogue: Catalogue) -> tuple[Catalogue, bytes]:
        """The catalogue with words that readers take, and its bytes."""
        for encoded, bounded, data in self._catalogues:
            if encoded == catalogue:
                return bounded, data
        bounded = tuple(info.bounded() for info in catalogue)
        shortened = [info.name for info, whole in zip(bounded, catalogue, strict=True) if info is not whole]
        if shortened:
            self._health.reached("shortened_names", len(shortened))
            self._health.note(
                "names",
                f"{len(shortened)} tensors have names of more than {MAX_WORD_BYTES} bytes, which are recorded shortened;"
                f" the first is {shortened[0][:80]}",
            )
        data = catalogue_bytes(bounded)
        self._catalogues.appendleft((catalogue, bounded, data))
        return bounded, data
