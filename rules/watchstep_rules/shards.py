"""Rows of disjoint shards merged into rows of the logical tensor, as rules that wait for seals see them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from watchstep.block import Block, Places, concatenate
from watchstep.statistics import merge_rows


def merge_shards(block: Block) -> Block:
    """Merge the shards of each (step, mode, tensor, replica, stage); replicas and whole tensors stay as they are.

    Workers merge in ascending order, whatever order they arrived in. The merged row takes the lowest worker, its
    place in the block and the latest time. It has no probes: they do not merge. The result is in canonical order.
    """
    sharded = block.places.shard_count > 1
    if not sharded.any():
        return block.ordered()
    whole = block.where(~sharded)
    merged = _merged(block.where(sharded).ordered())
    return (concatenate([whole, merged]) if len(whole) else merged).ordered()


def _merged(block: Block) -> Block:
    places = block.places
    key = np.stack([block.step, block.mode, block.tensor, places.replica, places.stage]).astype(np.int64)
    _, first, group = np.unique(key, axis=1, return_index=True, return_inverse=True)
    group = group.ravel()
    latest = block.time_ns[first]
    np.maximum.at(latest, group, block.time_ns)
    row = block.take(first)
    ones = np.ones(len(first), np.int32)
    return replace(
        row,
        time_ns=latest,
        places=Places(np.zeros_like(ones), ones, row.places.replica, row.places.stage),
        statistics=merge_rows(block.statistics, group, len(first)),
        probes={},
    )
