"""Runs written straight onto a store, segment by segment, from blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format import documents
from watchstep.format.block import Block
from watchstep.format.layout import RUN_DOCUMENT, SegmentKey, WriterId
from watchstep.format.segment import encode
from watchstep.format.tensors import Placement
from watchstep.store.store import Store

LOSS = tensor("loss", "losses", shape=())
FIRST = gradient("first", order=1)
SECOND = gradient("second", order=2)


def new_run(folder: Path, run: str = "r") -> Store:
    """An empty run; the store as seen from its prefix."""
    store = Store.open(folder, create=True).child(f"default/{run}")
    store.put(RUN_DOCUMENT, documents.encode(documents.RunDocument("default", run, 1)))
    return store


def write(
    store: Store, blocks: Sequence[Block], attempt: str = "a", writer: str = "w0", seq: int = 0
) -> None:
    """One segment for each block with rows."""
    for block in blocks:
        if len(block):
            steps = int(np.min(block.step)), int(np.max(block.step))
            store.put(SegmentKey(WriterId(attempt, "node", writer), seq, *steps).path, encode(block))
            seq += 1


def some_rows(steps: range, workers: int = 1, factor: float = 1.0) -> list[Row]:
    """A loss and two gradients at each step and worker; elements follow from step and worker."""
    return [
        Row(step, info, [factor * (step + 1), -0.5 * worker - index, 0.0], worker=worker)
        for step in steps
        for worker in range(workers)
        for index, info in enumerate((LOSS, FIRST, SECOND))
    ]


def sharded_rows(steps: range, shards: int) -> list[Row]:
    """The first gradient in shards, one for each worker."""
    return [
        Row(step, FIRST, [step + shard, -1.0, 2.0**shard], worker=shard, place=Placement(shard, shards))
        for step in steps
        for shard in range(shards)
    ]


def small_run(folder: Path, run: str = "r", workers: int = 1, factor: float = 1.0) -> Path:
    """Twelve steps in three segments."""
    store = new_run(folder, run)
    parts = [range(4), range(4, 8), range(8, 12)]
    write(store, [block_of(some_rows(steps, workers, factor)) for steps in parts])
    return folder / "default" / run
