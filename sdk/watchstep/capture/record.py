"""A record: statistics of some tensors at one step, on their way to the writer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from watchstep.block import Block, Places, concatenate
from watchstep.kernels.interface import Measurement
from watchstep.statistics import merge_rows
from watchstep.tensors import MODES, Mode, Placement, TensorInfo

_ROW_BYTES = 700
"""What one row of statistics takes in memory, with a histogram of about 40 bins."""


@dataclass(frozen=True)
class Group:
    """Tensors that are measured together, and what is known of them.

    Attributes:
        tensors: in the order of the measurement's rows.
        places: the placement of each.
    """

    tensors: tuple[TensorInfo, ...]
    places: tuple[Placement, ...]

    @classmethod
    def of(cls, tensors: tuple[TensorInfo, ...], place: Placement | None = None) -> Group:
        """Tensors of one placement; whole and on this worker alone where none is given."""
        return cls(tensors, (place or Placement(),) * len(tensors))


@dataclass(frozen=True)
class Record:
    """Statistics of a group at one step in one mode."""

    step: int
    mode: Mode
    worker: int
    time_ns: int
    group: Group
    measurement: Measurement

    @property
    def bytes(self) -> int:
        """About how much memory it holds."""
        return _ROW_BYTES * len(self.group.tensors)


def to_block(record: Record) -> Block:
    """A record's rows. Waits for the device."""
    statistics = record.measurement.collect()
    rows = len(record.group.tensors)
    if len(statistics) != rows:
        raise ValueError(f"the kernel gave {len(statistics)} rows for {rows} tensors")
    return Block(
        step=np.full(rows, record.step, np.int64),
        mode=np.full(rows, MODES.index(record.mode), np.int8),
        worker=np.full(rows, record.worker, np.int32),
        time_ns=np.full(rows, record.time_ns, np.int64),
        tensor=np.arange(rows, dtype=np.int32),
        catalogue=record.group.tensors,
        places=Places.of(list(record.group.places)),
        statistics=statistics,
    )


def merge_repeats(block: Block) -> Block:
    """Merge rows of one tensor, step, mode and worker: micro-batches, and modules that are called several times."""
    key = np.stack([block.step, block.mode, block.worker, block.tensor, block.places.shard_index])
    _, first, group = np.unique(key, axis=1, return_index=True, return_inverse=True)
    if len(first) == len(block):
        return block.ordered()
    merged = block.take(first)
    return Block(
        step=merged.step,
        mode=merged.mode,
        worker=merged.worker,
        time_ns=merged.time_ns,
        tensor=merged.tensor,
        catalogue=block.catalogue,
        places=merged.places,
        statistics=merge_rows(block.statistics, group.ravel(), len(first)),
    ).ordered()


def join(records: list[Record]) -> Block:
    """All records as one block in canonical order."""
    return merge_repeats(concatenate([to_block(record) for record in records]))
