"""The steps of a block, one after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from watchstep.block import Block


def whole_steps(block: Block) -> list[NDArray[np.intp]]:
    """Rows of each step in train mode, steps ascending, rows in their order."""
    rows = np.flatnonzero(block.mode == 0)
    rows = rows[np.argsort(block.step[rows], kind="stable")]
    return [part for part in np.split(rows, np.flatnonzero(np.diff(block.step[rows])) + 1) if len(part)]
