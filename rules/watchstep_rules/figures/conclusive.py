"""Which rows can show that a rule's condition does not hold, for rules that judge more or other than finite elements."""

from __future__ import annotations

from functools import reduce

import numpy as np
from numpy.typing import NDArray

from watchstep.block import Block
from watchstep_rules.figures.in_a_row import probe


def has_elements(block: Block) -> NDArray[np.bool_]:
    """Rows of tensors with elements, of any kind; bool, shape (n,). For rules about NaN and infinity, or about equality."""
    return block.statistics.count > 0


def has_probe(block: Block, *names: str) -> NDArray[np.bool_]:
    """Rows at which one of the probes was measured; bool, shape (n,)."""
    measured = (np.isfinite(probe(block, name)) for name in names)
    return reduce(np.logical_or, measured, np.zeros(len(block), np.bool_))
