"""Encoding finished steps as segments, and the segments that wait for the store: the newest in memory, older ones on disk if memory is short."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from watchstep.capture.health import RecorderHealth
from watchstep.capture.steps.record import FinishedStep, join, merge_repeats
from watchstep.capture.upload.outgoing import Doubt, Outgoing, SegmentPlace
from watchstep.capture.upload.spill import Spill
from watchstep.format.block import Block, concatenate
from watchstep.format.catalogue import catalogue_bytes
from watchstep.format.documents import EndDocument
from watchstep.format.layout import WriterId
from watchstep.format.segment import encode
from watchstep.format.tensors import MAX_WORD_BYTES, TensorInfo


class Backlog:
    """Segments that are not on the store yet. Thread-safe; the lock is never held during requests to the store.

    Segments on disk are always older than those in memory, so taking from the disk first keeps the order. If
    neither has room, nothing more is taken from the queue, and the queue drops the newest steps before they get a number, so that
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
        """Whether there is no room."""
        with self._lock:
            return self._bytes >= self._limit or self._sealed

    @property
    def empty(self) -> bool:
        """Whether everything is on the store, and nothing on disk."""
        with self._lock:
            return not self._memory and not len(self._spill)

    @property
    def segments(self) -> int:
        """Number of segments that were numbered and not dropped."""
        with self._lock:
            return self._segments

    @property
    def oldest(self) -> int:
        """Number of the oldest segment that is not on the store; that of the next one if all are."""
        with self._lock:
            return self._memory[0].place.seq if self._memory else self._segments

    @property
    def base(self) -> int:
        """Number of the segment that is the first of this process's own writer."""
        with self._lock:
            return self._spill.about.base or 0

    @property
    def doubt(self) -> Doubt | None:
        """The oldest segments, if the node's writer may have stored them already."""
        with self._lock:
            return None if self._sealed else self._spill.about.doubt

    def hand_over(self) -> bool:
        """Let another process upload from now on: nothing is written to disk. Returns False if segments wait there."""
        with self._lock:
            self._handing = not len(self._spill) and not self._sealed and self._spill.about.doubt is None
            return self._handing

    def after(self, number: int, limit: int) -> list[Outgoing]:
        """Return segments in memory from a number on: at least one if there is any, and more up to ``limit`` bytes."""
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
        """Remove the oldest segments, with these numbers, because they are on the store."""
        with self._lock:
            while self._memory and self._memory[0].place.seq in numbers:
                item = self._memory.popleft()
                self._bytes -= len(item.data)
                self._health.count("rows", item.place.rows)

    def take_back(self, doubt: Doubt | None, written: int) -> None:
        """Let this process upload again, with its own writer.

        Args:
            doubt: segments whose state must be determined first.
            written: number of segments of its own writer on the store.
        """
        with self._lock:
            if self._handing:
                self._handing = False
                self._spill.describe(replace(self._spill.about, base=None, written=written, doubt=doubt))

    def doubted(self) -> list[Outgoing]:
        """Return the segments in doubt."""
        with self._lock:
            doubt = self._spill.about.doubt
            if doubt is None or self._sealed:
                return []
            last = max(doubt.numbers)
            doubted = self._spill.oldest(last)
            return doubted + [item for item in self._memory if item.place.seq <= last]

    def settled(self, contained: tuple[int, ...]) -> None:
        """Resolve the doubt: of the segments in doubt, these are on the store."""
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
        """Add a segment of these steps; it gets the next number."""
        with self._lock:
            self._memory.append(Outgoing(SegmentPlace(self._segments, first, last, rows), data))
            self._segments += 1
            self._bytes += len(data)
            self._health.reached("most_backlog_bytes", self._bytes)
            if not self._handing:
                self._relieve(self._limit)

    def relieve(self) -> None:
        """Write everything in memory to disk, as far as there is room."""
        with self._lock:
            if not self._sealed and not self._handing:
                self._relieve(1)

    def _relieve(self, limit: int) -> None:
        while self._memory and self._bytes >= limit and self._spill.add(self._memory[0]):
            self._bytes -= len(self._memory.popleft().data)

    def head(self) -> Outgoing | None:
        """Return the oldest segment; None if there is none, or another process uploads."""
        with self._lock:
            if self._sealed:
                return None
            return self._spill.head() or (self._memory[0] if self._memory else None)

    def remove(self, head: Outgoing) -> bool:
        """Remove the head, which is on the store now, wherever it is kept. Returns False if it was dropped before."""
        with self._lock:
            if self._sealed:
                return False
            if self._memory and self._memory[0].place.seq == head.place.seq:
                self._bytes -= len(self._memory.popleft().data)
                return True
            return self._spill.remove(head.place.seq)

    def claimed(self, writer: WriterId) -> None:
        """Set the writer of all present and future segments."""
        with self._lock:
            self._spill.describe(replace(self._spill.about, writer=writer))

    def seal(self) -> None:
        """Write everything to disk: this process uploads nothing more. What does not fit is dropped and counted.

        Only the last segments are dropped, so that the rest has no gap.
        """
        with self._lock:
            self._sealed = self._spill.ending = True
            self._spill.drop_removed()
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

    def release(self, end: EndDocument | None) -> str:
        """Release the spill folder, with the end document in it if that is not on the store. Returns its path."""
        with self._lock:
            if end is not None:
                self._spill.add_end(end)
            elif not len(self._spill):
                self._spill.close()
            return self._spill.detach()

    def forget(self) -> None:
        """Reset in a forked child: everything belongs to its parent."""
        self._spill.forget()


Catalogue = tuple[TensorInfo, ...]

_CATALOGUES = 4
"""Number of cached catalogues. The same few recur: of losses only, of all layers, with system samples. Encoding
a catalogue takes 16 µs per tensor."""


@dataclass(frozen=True)
class _Steps:
    """Several steps as one block, which needs few Python objects regardless of the number of records."""

    first: int
    last: int
    number: int
    rows: int
    block: Block


_ROW_BYTES = 60
"""Bytes of a row's step, mode, worker, time, tensor and placement."""


class SegmentEncoder:
    """Collects steps and encodes them as segments; caches recently encoded catalogues.

    Records are Python objects. Those that wait for the next segment are traversed by each run of the garbage collector, and
    after some ten thousand it traverses all objects of the process, which stops training for a tenth of a second or more. Records
    are therefore converted to arrays a few steps at a time.

    Attributes:
        rows: number of collected rows.
        bytes: size of their arrays; encoding takes about twice as much in addition.
    """

    def __init__(self, backlog: Backlog, health: RecorderHealth) -> None:
        self._backlog = backlog
        self._health = health
        self._catalogues: deque[tuple[Catalogue, Catalogue, bytes]] = deque(maxlen=_CATALOGUES)
        self._taken: list[_Steps] = []
        self._encoded_rows: Callable[[Block], None] | None = None
        self._taken_rows: Callable[[Block], None] | None = None
        self.rows = 0
        self.bytes = 0

    def pass_on(self, receive: Callable[[Block], None]) -> None:
        """Also pass the rows of each encoded segment to a function, which must not block or raise."""
        self._encoded_rows = receive

    def pass_on_at_once(self, receive: Callable[[Block], None]) -> None:
        """Also pass rows to a function as they are collected, which must not block or raise. Rows of a step may come in parts."""
        self._taken_rows = receive

    def take_in(self, steps: list[FinishedStep]) -> None:
        """Convert some steps to arrays for the next segment. Steps that cannot be converted are dropped and counted."""
        try:
            block = join([record for step in steps for record in step.records])
        except Exception as error:  # noqa: BLE001 - counted; other steps may be valid
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
            if self._taken_rows is not None:
                self._taken_rows(block)

    def encode(self) -> None:
        """Add a segment of the collected steps to the backlog. Steps that cannot be encoded are dropped and counted."""
        taken = self._take_out()
        if taken:
            self._encode(taken)

    def drop_rest(self) -> None:
        """Count collected steps that cannot be written any more as dropped."""
        for steps in self._take_out():
            self._drop(steps.number, steps.rows)

    def _take_out(self) -> list[_Steps]:
        taken, self._taken, self.rows, self.bytes = self._taken, [], 0, 0
        return taken

    def _encode(self, taken: list[_Steps]) -> None:
        try:
            block = merge_repeats(concatenate([steps.block for steps in taken]))
            catalogue, packed = self._encoded(block.catalogue)
            block = replace(block, catalogue=catalogue)
            data = encode(block, packed)
        except Exception as error:  # noqa: BLE001 - counted; other steps may be valid
            if len(taken) > 1:
                for steps in taken:
                    self._encode([steps])
                return
            self._drop(taken[0].number, taken[0].rows, error)
            return
        self._backlog.add(taken[0].first, taken[-1].last, len(block), data)
        if self._encoded_rows is not None:
            self._encoded_rows(block)

    def _drop(self, steps: int, rows: int, error: Exception | None = None) -> None:
        if error is not None:
            self._health.fault("encoding", error)
        self._health.count("dropped_rows", rows)
        self._health.count("dropped_steps", steps)

    def _encoded(self, catalogue: Catalogue) -> tuple[Catalogue, bytes]:
        """Return the catalogue with bounded names, and its bytes."""
        for encoded, bounded, data in self._catalogues:
            if encoded == catalogue:
                return bounded, data
        bounded = tuple(info.bounded() for info in catalogue)
        shortened = [info.name for info, whole in zip(bounded, catalogue, strict=True) if info is not whole]
        if shortened:
            self._health.reached("shortened_names", len(shortened))
            self._health.note(
                "names",
                f"the names of {len(shortened)} tensors exceed {MAX_WORD_BYTES} bytes, and are recorded shortened;"
                f" the first is {shortened[0][:80]}",
            )
        data = catalogue_bytes(bounded)
        self._catalogues.appendleft((catalogue, bounded, data))
        return bounded, data
