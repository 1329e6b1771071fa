"""Weights that the program loads between two steps, as after the search for a learning rate or a step back to a checkpoint."""

from __future__ import annotations

import numpy as np

from watchstep.format.block import Block
from watchstep_rules.rule import is_metric
from watchstep_rules.signals.tensor_selection import rows_where

LOADED = "weights:loaded"
"""Metric of the recorder: 1 at the step after which the program loaded weights."""


def loaded_steps(block: Block) -> list[int]:
    """Return the steps of a block after which weights were loaded, ascending."""
    rows = rows_where(block, is_metric, LOADED) & (block.statistics.mean > 0)
    steps: list[int] = np.unique(block.step[rows]).tolist()
    return steps
