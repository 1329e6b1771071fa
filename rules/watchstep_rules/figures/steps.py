"""The steps of a block, one after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from watchstep.block import Block
from watchstep.block_view import view


def whole_steps(block: Block) -> list[NDArray[np.intp]]:
    """Rows of each step in train mode, steps ascending, rows in their order."""
    rows = np.flatnonzero(block.mode == 0)
    rows = rows[np.argsort(block.step[rows], kind="stable")]
    return [part for part in np.split(rows, np.flatnonzero(np.diff(block.step[rows])) + 1) if len(part)]


def in_training(block: Block) -> Block:
    """The rows in train mode, steps ascending, rows of a step in their order; the block itself where it is so."""
    if bool((block.mode == 0).all()) and bool((np.diff(block.step) >= 0).all()):
        return block
    rows = np.flatnonzero(block.mode == 0)
    return view(block, rows[np.argsort(block.step[rows], kind="stable")])


def step_numbers(block: Block) -> NDArray[np.intp]:
    """Of each row the number of its step among those of the block, from 0; steps ascend."""
    if not len(block):
        return np.empty(0, np.intp)
    return np.concatenate([[0], np.cumsum(np.diff(block.step) != 0)])
