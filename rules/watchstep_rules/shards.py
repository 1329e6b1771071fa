"""Rows of disjoint shards merged into rows of the logical tensor, as rules that wait for seals see them."""

from __future__ import annotations

import numpy as np

from watchstep.block import Block, Places
from watchstep.statistics import merge_rows


def merge_shards(block: Block) -> Block:
    """Merge the shards of each (step, mode, tensor, replica, stage); replicas stay apart.

    Workers merge in ascending order, whatever order they arrived in. The merged row takes the lowest worker, its
    place in the block and the latest time. Probes of merged rows are dropped: they do not merge.
    """
    if not len(block) or not (block.places.shard_count > 1).any():
        return block
    block = block.ordered()
    key = np.stack(
        [block.step, block.mode, block.tensor, block.places.replica, block.places.stage.astype(np.int64)]
    )
    _, first, group = np.unique(key, axis=1, return_index=True, return_inverse=True)
    group = group.ravel()
    merged = block.take(first)
    latest = np.zeros(len(first), np.int64)
    np.maximum.at(latest, group, block.time_ns)
    whole = Places(
        np.zeros(len(first), np.int32),
        np.ones(len(first), np.int32),
        merged.places.replica,
        merged.places.stage,
    )
    return Block(
        step=merged.step,
        mode=merged.mode,
        worker=merged.worker,
        time_ns=latest,
        tensor=merged.tensor,
        catalogue=block.catalogue,
        places=whole,
        statistics=merge_rows(block.statistics, group, len(first)),
    ).ordered()
