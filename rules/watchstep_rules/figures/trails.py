"""What stood in the rows before each row, of the same tensor, worker and mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.block import Block
from watchstep.statistics import Floats

Column = Callable[[Block], NDArray[Any]]


@dataclass(frozen=True)
class Trail:
    """Rows of a block behind those of its context, each series by itself.

    Attributes:
        context: earlier rows, as the contract gives them.
        block: n rows to judge.
        order: rows of context and block, those of a series together, as they came.
        place: where in ``order`` each row of the block stands, int64 of shape (n,).
        start: where in ``order`` its series begins.
    """

    context: Block
    block: Block
    order: NDArray[np.int64]
    place: NDArray[np.int64]
    start: NDArray[np.int64]

    @classmethod
    def of(cls, context: Block, block: Block) -> Trail:
        """Behind these rows of the context, those of the block."""
        known = {info.name: index for index, info in enumerate(block.catalogue)}
        tensor = np.array([known.get(info.name, -1) for info in context.catalogue], np.int64)
        past = context.series_key()
        if len(context):
            past = (tensor[context.tensor] << 32) | (past & 0xFFFFFFFF)
        key = np.concatenate([past, block.series_key()])
        order = np.argsort(key, kind="stable")
        place = np.empty(len(key), np.int64)
        place[order] = np.arange(len(key))
        start = np.searchsorted(key[order], key, side="left")
        return cls(context, block, order, place[len(context) :], start[len(context) :])

    def at(self, rows: NDArray[np.intp]) -> Trail:
        """Behind some rows of the block alone."""
        return replace(self, place=self.place[rows], start=self.start[rows])

    def column(self, figure: Column) -> Floats:
        """A figure of the context's rows and of the block's, one after the other, as `back` takes it."""
        return np.concatenate([figure(self.context), figure(self.block)]).astype(np.float64)

    def back(self, column: Floats, rows: int) -> Floats:
        """Of each row of the block, what stood so many rows before it in its series; NaN where there is none."""
        at = self.place - rows
        held = np.full(len(at), np.nan)
        there = at >= self.start
        held[there] = column[self.order[at[there]]]
        return held
