"""Rows of one attempt by their steps, a bounded part of them in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from watchstep.format.block import Block, concatenate
from watchstep.reading.columns import Want
from watchstep.reading.index import RunIndex

ROWS = 500_000
"""Rows that are read at once, about: some 250 MB."""

_HELD = 2
"""Ranges that are kept: the one that is being read, and one for a worker that is late."""


class StepReader:
    """Reads an attempt by ranges of steps, wherever its rows lie. Not thread-safe."""

    def __init__(self, index: RunIndex, attempt: str) -> None:
        self._index, self._attempt = index, attempt
        objects = [located.object for located in index.objects(attempt)]
        self.first = min((held.first for held in objects), default=0)
        self.last = max((held.last for held in objects), default=-1)
        steps = self.last - self.first + 1
        self._width = max(1, ROWS * steps // max(1, sum(held.rows for held in objects)))
        self._held: OrderedDict[int, Block] = OrderedDict()

    def chunks(self, first: int = 0) -> Iterator[tuple[Block, int]]:
        """(rows in canonical order, their last step) of one range of steps after the other, from a step on."""
        for start in range(max(first, self.first), self.last + 1, self._width):
            last = min(self.last, start + self._width - 1)
            yield self._read(start, last).ordered(), last

    def rows_of(self, rank: int, first: int, last: int) -> Block:
        """Rows of one rank, in canonical order, from a first step to a last."""
        parts = []
        for number in range(first // self._width, last // self._width + 1):
            block = self._range(number)
            chosen = (block.worker == rank) & (block.step >= first) & (block.step <= last)
            parts.append(block.where(chosen))
        return concatenate(parts).ordered()

    def _range(self, number: int) -> Block:
        if number not in self._held:
            while len(self._held) >= _HELD:
                self._held.popitem(last=False)
            self._held[number] = self._read(number * self._width, (number + 1) * self._width - 1)
        self._held.move_to_end(number)
        return self._held[number]

    def _read(self, first: int, last: int) -> Block:
        want = Want((), None, first, last)
        return self._index.consistently(lambda: concatenate(self._index.blocks(self._attempt, want)))
