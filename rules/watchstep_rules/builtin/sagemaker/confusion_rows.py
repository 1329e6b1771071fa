"""Rows of confusion matrices: those of one step, worker and mode are the classes of one matrix."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, sort_key
from watchstep_rules.signals.tensor_selection import has_role, rows_where


def whole_matrices(block: Block) -> Iterator[NDArray[np.intp]]:
    """Rows of each matrix of a block of whole steps, int64 of shape (classes,), ascending by class."""
    rows = np.flatnonzero(rows_where(block, has_role, "confusion"))
    if not len(rows):
        return
    key = sort_key(block.step[rows], block.worker[rows], block.mode[rows])
    order = np.argsort(key, kind="stable")
    for part in np.split(rows[order], np.flatnonzero(np.diff(key[order])) + 1):
        yield np.array(sorted(part.tolist(), key=lambda row: class_of(block, row)), np.intp)


def class_of(block: Block, row: int) -> int:
    """The class that a row is of, by its name."""
    return int(block.info(row).name.rpartition("/")[2])
