"""Rows of saved tensors with their values: the block of a rule that reads full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block


@dataclass(frozen=True)
class SavedBlock(Block):
    """One row for each tensor in each saved object, with its statistics and values.

    The row of a tensor of which only a part was saved, such as a shard, has the values and statistics of that part.

    Attributes:
        values: the values of each row, in the tensor's shape. Bfloat16 and fp8 are float32, which represents them exactly.
        references: for each row the values of the same tensor, step and mode in the reference run; None if it has none, or if the
            rule needs no reference.
    """

    values: Sequence[NDArray[Any]] = ()
    references: Sequence[NDArray[Any] | None] = ()

    @classmethod
    def of(
        cls,
        rows: Block,
        values: Sequence[NDArray[Any]],
        references: Sequence[NDArray[Any] | None] | None = None,
    ) -> SavedBlock:
        """Return rows with their values, each sequence of length n."""
        columns = {field.name: getattr(rows, field.name) for field in fields(Block)}
        return cls(
            **columns,
            values=tuple(values),
            references=(None,) * len(rows) if references is None else tuple(references),
        )

    @classmethod
    def empty(cls) -> SavedBlock:
        """Return a block without rows."""
        return cls.of(Block.empty(), ())

    def take(self, rows: NDArray[np.intp]) -> SavedBlock:
        """Return some rows, in that order."""
        chosen = rows.tolist()
        return SavedBlock.of(
            super().take(rows),
            [self.values[row] for row in chosen],
            [self.references[row] for row in chosen],
        )

    def ordered(self) -> SavedBlock:
        """Return the same rows in the canonical order for rules."""
        position = Block.take(self, np.arange(len(self)))
        order = _order(position)
        return self if order is None else self.take(order)


def empty_like(block: Block) -> Block:
    """Return a block without rows, with values if the given block has values."""
    return SavedBlock.empty() if isinstance(block, SavedBlock) else Block.empty()


def _order(rows: Block) -> NDArray[np.intp] | None:
    """The permutation that sorts rows by (step, worker, mode, tensor); None if they are sorted."""
    names = np.array([info.name for info in rows.catalogue] or [""])
    rank = np.empty(len(names), np.int64)
    rank[np.argsort(names, kind="stable")] = np.arange(len(names))
    order = (
        np.lexsort((rank[rows.tensor], rows.mode, rows.worker, rows.step))
        if len(rows)
        else np.empty(0, np.intp)
    )
    return None if (order == np.arange(len(rows))).all() else order
