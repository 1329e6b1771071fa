"""What a leader knows: whose blocks wait, which object is being made of them, and the next number. No input or output."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from watchstep.capture.upload.outgoing import Blocks, Notice, Outgoing
from watchstep.format.layout import SegmentKey, WriterId

_MAX_ROWS = 200_000  # of one object, unless one block alone has more
_MAX_BYTES = 32 * 1024 * 1024

Items = dict[str, tuple[Outgoing, ...]]


@dataclass(frozen=True)
class Batch:
    """An object to be made, and the blocks that go into it."""

    notice: Notice
    items: Items

    def under(self, term: str, gone: Collection[str] = ()) -> Batch:
        """The same object as it is announced in a term, without the blocks of ranks that could not be told.

        Its name stays, even where nothing is left in it: who has heard of the name may make the object.
        """
        items = {token: held for token, held in self.items.items() if token not in gone}
        blocks = {token: self.notice.blocks[token] for token in items}
        return Batch(Notice(self.notice.key, blocks, term), items)


class Leading:
    """The leader's state. One object is made at a time; a number is given again only to the same name.

    Attributes:
        writer: the node's writer.
        seq: the next object's number.
        flight: what is being made: the store may have been asked for it.
    """

    def __init__(self, writer: WriterId, seq: int) -> None:
        self.writer = writer
        self.seq = seq
        self.flight: Batch | None = None
        self._waiting: dict[str, deque[Outgoing]] = {}
        self._next: dict[str, int] = {}
        self._gone: set[str] = set()  # whose blocks in flight are their own again

    def join(self, token: str) -> None:
        """A rank hands over from now on; its first block may have any number."""
        self._waiting[token] = deque()
        self._next.pop(token, None)

    def lose(self, token: str) -> None:
        """A rank is gone, or writes for itself: what it handed over is its own again, but for what is in flight."""
        self._waiting.pop(token, None)
        if self.flight is not None:
            self._gone.add(token)

    def take(self, token: str, item: Outgoing) -> bool:
        """A block was handed over; False where nothing is wanted of it."""
        number = item.place.seq
        if token not in self._waiting or number != self._next.get(token, number):
            return False
        self._waiting[token].append(item)
        self._next[token] = number + 1
        return True

    def propose(self) -> Batch | None:
        """The next object, which nobody has been told of; None where nothing waits, or one is in flight."""
        if self.flight is not None:
            return None
        items: Items = {}
        rows = size = 0
        for token, waiting in self._waiting.items():
            chosen: list[Outgoing] = []
            for item in waiting:
                over = rows + item.place.rows > _MAX_ROWS or size + len(item.data) > _MAX_BYTES
                if over and (items or chosen):
                    break
                chosen.append(item)
                rows, size = rows + item.place.rows, size + len(item.data)
            if chosen:
                items[token] = tuple(chosen)
        if not items:
            return None
        places = [item.place for held in items.values() for item in held]
        key = SegmentKey(
            self.writer, self.seq, min(place.first for place in places), max(place.last for place in places)
        )
        blocks = {token: tuple(item.place.seq for item in held) for token, held in items.items()}
        return Batch(Notice(key, blocks, ""), items)

    def begin(self, batch: Batch) -> None:
        """Everybody was told of the batch: the store is asked from now on, and nothing else until it has answered."""
        assert self.flight is None
        for token, held in batch.items.items():
            for _ in held:
                self._waiting[token].popleft()
        self.flight = batch

    def land(self, contained: Blocks) -> None:
        """The object lies on the store with these blocks. The others, of ranks that are still here, wait again."""
        assert self.flight is not None
        for token, held in self.flight.items.items():
            back = [item for item in held if item.place.seq not in contained.get(token, ())]
            if token in self._waiting and token not in self._gone:
                self._waiting[token].extendleft(reversed(back))
        self.seq = self.flight.notice.key.seq + 1
        self.flight = None
        self._gone.clear()
