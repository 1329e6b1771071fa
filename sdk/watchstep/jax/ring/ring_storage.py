"""The Refs of a ring of steps, and the layout of its ledger.

The *ledger* is int32 of shape (slots + 1, 8). Its first row is (number of updates, number of row sets, cadence, whether the last update was bad, number of
bad updates, then of the first bad one: number, 1 if skipped plus 2 if its gradients are bad, row set; the number is -1 without one). The others are a ring of updates:
(number, bad, skipped, row set or -1, two words of the loss, whether its gradients are bad, 0). The first row is not overwritten: a bad update is found even if its own row is.

Rows of statistics (`watchstep.jax.device_rows`) are a ring of row sets of shape (row slots, rows, words).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from watchstep.jax.device_rows import RowLayout
from watchstep.jax.sharding.shard_rows import ShardedTensor


class LedgerColumn(enum.IntEnum):
    """Columns of the ledger's first row."""

    UPDATES = 0
    ROW_SETS = 1
    EVERY = 2
    WAS_BAD = 3
    BAD_UPDATES = 4
    FIRST_BAD = 5
    FIRST_FLAGS = 6
    FIRST_ROW_SET = 7


class EntryColumn(enum.IntEnum):
    """Columns of the ledger's other rows. The loss takes two."""

    NUMBER = 0
    BAD = 1
    SKIPPED = 2
    ROW_SET = 3
    LOSS = 4
    BAD_GRADIENTS = 6


_COLUMNS = 8


def fresh_ledger(slots: int, every: int) -> NDArray[Any]:
    """Return a ledger without updates.

    Args:
        slots: Updates that it holds.
        every: The cadence.
    """
    ledger = np.full((slots + 1, _COLUMNS), -1, np.int32)
    ledger[0] = (0, 0, every, 0, 0, -1, 0, -1)
    return ledger


@dataclass
class ReadCursor:
    """What the host has read of a storage since its memory was created.

    Attributes:
        updates: Number of updates.
        bad: Number of bad ones among them.
    """

    updates: int = 0
    bad: int = 0


@dataclass(eq=False)
class RingStorage:
    """The Refs of a ring, for programs with the same tensors.

    Attributes:
        signature: Shapes and dtypes of what is recorded.
        mesh: The mesh of the context in which the Refs were created, which is part of their type.
        layout: Layout of a row set: gradients, then weights.
        gradient_rows: Number of rows of gradients.
        has_weights: Whether rows of weights follow them.
        slots: Updates that the ledger holds.
        ledger: The ledger.
        rows: Rings of row sets.
        loss_dtype: Type of the loss, float32 or float64; None without a loss.
        every: The cadence in the ledger.
        cursor: What was read.
        wants_rows: Whether the next snapshot needs rows.
        resets_first_bad: Whether the first bad update in the ledger was read.
        is_stale: Whether the memory must be replaced before it is used.
        tensors: How what is measured is distributed over devices; empty if rows are those of whole arrays. Otherwise each device has rows of its own shards,
            the Refs of rows have a leading dimension of devices, and the ledger has a copy on each.
    """

    signature: Any
    mesh: Any
    layout: RowLayout
    gradient_rows: int
    has_weights: bool
    slots: int
    ledger: Any
    rows: tuple[Any, ...]
    loss_dtype: np.dtype[Any] | None
    every: int
    cursor: ReadCursor = field(default_factory=ReadCursor)
    wants_rows: bool = False
    resets_first_bad: bool = False
    is_stale: bool = False
    tensors: tuple[ShardedTensor, ...] = ()

    @property
    def refs(self) -> tuple[Any, ...]:
        """All Refs."""
        return self.ledger, *self.rows

    @property
    def bytes(self) -> int:
        """Size of the row sets."""
        return sum(int(np.prod(ref.shape)) * ref.dtype.itemsize for ref in self.rows)

    @property
    def row_slots(self) -> int:
        """Row sets that it holds."""
        return int(self.rows[0].shape[1 if self.tensors else 0]) if self.rows else 1

    @property
    def shardings(self) -> tuple[Any, ...]:
        """Where each of `refs` is; None for one that may be on any device."""
        if not self.tensors:
            return (None,) * len(self.refs)
        return shardings_on(self.tensors[0].sharding.mesh, len(self.rows))


def shardings_on(mesh: Mesh, rows: int) -> tuple[NamedSharding, ...]:
    """Return where the ledger and the rings of row sets are, if devices have rows of their own.

    Args:
        mesh: The devices.
        rows: Number of rings of row sets.
    """
    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return (NamedSharding(mesh, PartitionSpec()), *(by_device,) * rows)
