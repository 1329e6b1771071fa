"""Earlier rows of an attempt: as many as its rules look back on, and all rows after the watermark.

Each row refers to the journal position of its segment. The positions of segments with needed rows are committed with the cursor, so
another process rebuilds exactly the same rows from exactly those segments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, concatenate, sort_key
from watchstep.format.tensors import TensorInfo
from watchstep_rules.engine.rule_inputs import Lookback
from watchstep_rules.signals.tensor_selection import CatalogueCache

_sorted: CatalogueCache[tuple[TensorInfo, ...]] = CatalogueCache()


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
        """Journal positions with rows, ascending."""
        return [int(position) for position in np.unique(self.position)]


def joined(parts: list[tuple[int, Block]], before: History) -> History:
    """Earlier rows followed by those of further segments, given as (position, rows) in journal order."""
    block = concatenate([before.block, *(rows for _, rows in parts)])
    position = np.concatenate(
        [before.position, *(np.full(len(rows), position, np.int64) for position, rows in parts)]
    )
    return History(block, position)


def trimmed(history: History, lookback: Lookback | int, watermark: int) -> History:
    """Only the rows that a later evaluation can need.

    Args:
        history: all rows.
        lookback: how far the rules look back, in rows of a series: the same for every tensor, or by scope. Shards are judged merged,
            so that many steps of all shards of a tensor are kept.
        watermark: the last step that all live workers passed; all later rows are kept.
    """
    block = history.block
    if not len(block):
        return History.empty()
    key = block.series_key()
    arrival = np.arange(len(block))
    if isinstance(lookback, int):
        depth = np.full(len(block), max(0, lookback), np.int64)
    else:
        depth = lookback.rows_of(block.catalogue)[block.tensor]
    needed = (block.step > watermark) | _last_of_each(key, arrival, depth)
    done = np.flatnonzero(block.step <= watermark)
    by_step = _last_of_each(key[done], np.lexsort((arrival[done], block.step[done])), depth[done])
    needed[done[by_step]] = True
    shards = done[block.places.shard_count[done] > 1]
    needed[shards[_of_last_steps(block.take(shards), depth[shards])]] = True
    rows = np.flatnonzero(needed)
    return History(block.take(rows), history.position[rows])


def _last_of_each(
    key: NDArray[np.int64], order: NDArray[np.intp], depth: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Rows that are among the last ``depth`` rows of their series in an order."""
    chosen = np.zeros(len(key), np.bool_)
    order = order[depth[order] > 0]
    if not len(order):
        return chosen
    grouped = order[np.argsort(key[order], kind="stable")]
    keys = key[grouped]
    from_end = np.searchsorted(keys, keys, side="right") - np.arange(len(keys))
    chosen[grouped[from_end <= depth[grouped]]] = True
    return chosen


def _of_last_steps(block: Block, depth: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Rows of shards that belong to the last ``depth`` steps of their logical tensor."""
    places = block.places
    key = sort_key(block.tensor, block.mode, places.replica, places.stage)
    order = np.lexsort((block.step, key))
    keys = key[order]
    # The number of each (tensor, step) pair, ascending.
    number = np.cumsum(np.diff(sort_key(key, block.step)[order], prepend=-1) != 0)
    last = number[np.searchsorted(keys, keys, side="right") - 1] if len(keys) else number
    chosen = np.zeros(len(block), np.bool_)
    chosen[order[last - number < depth[order]]] = True
    return chosen


def with_catalogue(block: Block, catalogue: tuple[TensorInfo, ...]) -> Block:
    """The same rows over another catalogue that contains all of the block's tensors."""
    if block.catalogue is catalogue or block.catalogue == catalogue:
        return replace(block, catalogue=catalogue) if block.catalogue is not catalogue else block
    index_of = {info.name: index for index, info in enumerate(catalogue)}
    new_index = np.array([index_of[info.name] for info in block.catalogue], np.int32)
    tensor = new_index[block.tensor] if len(block) else block.tensor
    return replace(block, tensor=tensor, catalogue=catalogue)


def union_catalogue(blocks: list[Block]) -> tuple[TensorInfo, ...]:
    """All tensors of the blocks, sorted by name; of several descriptions of one tensor, the last.

    Sorting makes the order of rows within a step independent of how segments are combined.
    """
    first = blocks[0].catalogue if blocks else ()
    if all(block.catalogue is first for block in blocks):
        return _sorted.get(first, "", lambda: _by_name(blocks))
    return _by_name(blocks)


def _by_name(blocks: list[Block]) -> tuple[TensorInfo, ...]:
    by_name = {info.name: info for block in blocks for info in block.catalogue}
    catalogue = tuple(by_name[name] for name in sorted(by_name))
    for block in blocks:
        if block.catalogue == catalogue:
            return block.catalogue  # the same object: caches identify a catalogue by its identity
    return catalogue


def canonical(block: Block) -> Block:
    """A segment's rows in canonical order over a catalogue sorted by name, as every evaluation uses them."""
    return with_catalogue(block, union_catalogue([block])).ordered()


def over_one_catalogue(history: Block, arrived: Block) -> tuple[Block, Block]:
    """Both blocks over one catalogue, so that rows of one step have the same order however segments are split."""
    catalogue = union_catalogue([history, arrived])
    return with_catalogue(history, catalogue), with_catalogue(arrived, catalogue)
