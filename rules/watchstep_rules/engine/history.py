"""Earlier rows of an attempt: as many as its rules look back on, and all rows after the watermark.

Each row refers to the journal position of its segment. The positions that still hold needed rows are committed with the cursor, so
another process rebuilds exactly the same rows from exactly those segments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, concatenate, sort_key
from watchstep.format.tensors import TensorInfo
from watchstep_rules.engine.rule_inputs import Lookback
from watchstep_rules.signals.tensor_selection import OfCatalogue

_sorted: OfCatalogue[tuple[TensorInfo, ...]] = OfCatalogue()


@dataclass(frozen=True)
class History:
    """Rows in journal order, and the journal position of each, int64 of shape (n,)."""

    block: Block
    position: NDArray[np.int64]

    @classmethod
    def empty(cls) -> History:
        """No rows."""
        return cls(Block.empty(), np.empty(0, np.int64))

    @property
    def positions(self) -> list[int]:
        """Journal positions that hold rows, ascending."""
        return [int(place) for place in np.unique(self.position)]


def joined(parts: list[tuple[int, Block]], before: History) -> History:
    """Earlier rows and those of further segments, as (position, rows) in journal order."""
    block = concatenate([before.block, *(rows for _, rows in parts)])
    position = np.concatenate(
        [before.position, *(np.full(len(rows), place, np.int64) for place, rows in parts)]
    )
    return History(block, position)


def trimmed(history: History, reach: Lookback | int, sealed: int) -> History:
    """Only the rows that a later evaluation can need.

    Args:
        history: all rows.
        reach: how far the rules look back, in rows of a series: as far for every tensor, or for each as far as the rules
            do that are given it. Of shards, which are judged merged, so many steps of all of them are kept.
        sealed: the last sealed step; later rows are all kept.
    """
    block = history.block
    if not len(block):
        return History.empty()
    key = block.series_key()
    arrival = np.arange(len(block))
    if isinstance(reach, int):
        depth = np.full(len(block), max(0, reach), np.int64)
    else:
        depth = reach.rows_of(block.catalogue)[block.tensor]
    needed = (block.step > sealed) | _last_of_each(key, arrival, depth)
    done = np.flatnonzero(block.step <= sealed)
    by_step = _last_of_each(key[done], np.lexsort((arrival[done], block.step[done])), depth[done])
    needed[done[by_step]] = True
    shards = done[block.places.shard_count[done] > 1]
    needed[shards[_of_last_steps(block.take(shards), depth[shards])]] = True
    rows = np.flatnonzero(needed)
    return History(block.take(rows), history.position[rows])


def _last_of_each(
    key: NDArray[np.int64], order: NDArray[np.intp], depth: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which rows are among the last of their series, when they stand in an order; so many as each one's depth says."""
    chosen = np.zeros(len(key), np.bool_)
    order = order[depth[order] > 0]
    if not len(order):
        return chosen
    grouped = order[np.argsort(key[order], kind="stable")]
    held = key[grouped]
    from_end = np.searchsorted(held, held, side="right") - np.arange(len(held))
    chosen[grouped[from_end <= depth[grouped]]] = True
    return chosen


def _of_last_steps(block: Block, depth: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows of shards are of the last steps of their logical tensor, whichever shard each is of."""
    places = block.places
    key = sort_key(block.tensor, block.mode, places.replica, places.stage)
    order = np.lexsort((block.step, key))
    held = key[order]
    number = np.cumsum(
        np.diff(sort_key(key, block.step)[order], prepend=-1) != 0
    )  # of each step of each tensor
    last = number[np.searchsorted(held, held, side="right") - 1] if len(held) else number
    chosen = np.zeros(len(block), np.bool_)
    chosen[order[last - number < depth[order]]] = True
    return chosen


def with_catalogue(block: Block, catalogue: tuple[TensorInfo, ...]) -> Block:
    """The same rows over another catalogue that holds all of the block's tensors."""
    if block.catalogue is catalogue or block.catalogue == catalogue:
        return replace(block, catalogue=catalogue) if block.catalogue is not catalogue else block
    place = {info.name: index for index, info in enumerate(catalogue)}
    moved = np.array([place[info.name] for info in block.catalogue], np.int32)
    tensor = moved[block.tensor] if len(block) else block.tensor
    return replace(block, tensor=tensor, catalogue=catalogue)


def union_catalogue(blocks: list[Block]) -> tuple[TensorInfo, ...]:
    """All tensors that blocks speak of, by name; of several descriptions of one, the last.

    Sorted by name, so that rows of one step stand in the same order whichever segments came together.
    """
    first = blocks[0].catalogue if blocks else ()
    if all(block.catalogue is first for block in blocks):
        return _sorted.get(first, "", lambda: _by_name(blocks))
    return _by_name(blocks)


def _by_name(blocks: list[Block]) -> tuple[TensorInfo, ...]:
    known = {info.name: info for block in blocks for info in block.catalogue}
    found = tuple(known[name] for name in sorted(known))
    for block in blocks:
        if block.catalogue == found:
            return block.catalogue  # the same object, which is known by being it
    return found


def canonical(block: Block) -> Block:
    """A segment's rows in canonical order, over a catalogue sorted by name: as every evaluation takes them."""
    return with_catalogue(block, union_catalogue([block])).ordered()


def over_one_catalogue(history: Block, arrived: Block) -> tuple[Block, Block]:
    """Both over one catalogue, so that rows of one step have the same order however the segments were split."""
    catalogue = union_catalogue([history, arrived])
    return with_catalogue(history, catalogue), with_catalogue(arrived, catalogue)
