"""Rows of disjoint shards merged into rows of the logical tensor, as rules that wait for seals see them."""

from __future__ import annotations

from typing import Any

import numpy as np

from watchstep.format.block import Block, LazyBlock, LazyStatistics, Places, sort_key, together, view
from watchstep.format.statistics import Merge

_FLAGS = ("changed", "was_optimized", "optimized_share", "after_optimized", "weight_optimized")
"""Probes of parameters that no optimizer holds: what holds of one shard holds of the parameter."""


def merge_shards(block: Block) -> Block:
    """Merge the shards of each (step, mode, tensor, replica, stage); replicas and whole tensors stay as they are.

    Workers merge in ascending order, whatever order they arrived in. The merged row takes the number of its replica as
    its worker, so that it belongs to the same series whichever of its shards are there, and the latest time. Of probes it has
    those of `_FLAGS`, the largest of all shards; others do not merge. The result is in canonical order, and makes its columns when
    they are read.
    """
    sharded = block.places.shard_count > 1
    if not sharded.any():
        return block.ordered()
    merged = _merged(view(block, np.flatnonzero(sharded)).ordered())
    if sharded.all():
        return merged.ordered()
    return together(view(block, np.flatnonzero(~sharded)), merged).ordered()


def _merged(block: Block) -> Block:
    places = block.places
    key = sort_key(block.step, block.mode, block.tensor, places.replica, places.stage)
    order = np.argsort(key, kind="stable")
    begins = np.concatenate([[True], np.diff(key[order]) != 0])
    starts = np.flatnonzero(begins)
    first = order[starts]
    group = np.empty(len(order), np.intp)
    group[order] = np.cumsum(begins) - 1
    merge = Merge(block.statistics, group, len(first))

    def column(name: str) -> Any:
        if name == "catalogue":
            return block.catalogue
        if name == "time_ns":
            return np.maximum.reduceat(block.time_ns[order], starts)
        if name == "worker":
            return places.replica[first]
        if name == "places":
            ones = np.ones(len(first), np.int32)
            return Places(np.zeros_like(ones), ones, places.replica[first], places.stage[first])
        if name == "statistics":
            return LazyStatistics.of(len(first), merge.column)
        if name == "probes":
            return {
                probe: np.maximum.reduceat(values[order], starts)
                for probe, values in block.probes.items()
                if probe in _FLAGS
            }
        return getattr(block, name)[first]

    return LazyBlock.of(len(first), column)
