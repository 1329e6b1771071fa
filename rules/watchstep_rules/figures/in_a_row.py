"""What holds at a record and at those before it, of the same tensor, worker and mode."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from watchstep.block import Block
from watchstep.statistics import Floats
from watchstep_rules.figures.trails import Trail


def in_a_row(
    context: Block, block: Block, hit: Callable[[Block], NDArray[np.bool_]], records: int
) -> NDArray[np.bool_]:
    """Whether so many records in a row, a row's own the last, are hits; bool of shape (n,).

    Args:
        context: earlier rows; the rule's lookback must be at least ``records - 1``.
        block: n rows.
        hit: of each row of a block, whether it is one.
        records: how many, at least 1.
    """
    if not hit(block).any():  # as nearly always
        return np.zeros(len(block), np.bool_)
    trail = Trail.of(context, block)
    column = trail.column(hit)
    found = np.ones(len(block), np.bool_)
    for back in range(records):
        found &= trail.back(column, back) > 0
    return found


def probe(block: Block, name: str) -> Floats:
    """A column of probes; NaN where the block has none."""
    column = block.probes.get(name)
    return np.full(len(block), np.nan) if column is None else column
