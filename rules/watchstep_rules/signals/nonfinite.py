"""Counts of NaN and infinity: in words, their usual causes, and which rows show that a condition does not hold."""

from __future__ import annotations

from functools import reduce

import numpy as np
from numpy.typing import NDArray

from watchstep.format import tensors
from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.signals.series import probe

BAD_BATCH = "The data hold NaN or infinity, or a value far beyond all others."
LOOK_AT_INPUT = "Look at model:input at this step: where it holds NaN or infinity, check batches with torch.isfinite before they are fed."
GAPS = "The batch of this step was bad, as measured: values are missing in the data, or what prepares them is at fault."
CHECK_BATCHES = (
    "Find the examples by torch.isfinite, before batches are fed; leave them out, or fill their gaps."
)


def nonfinite(block: Block) -> NDArray[np.int64]:
    """How many elements of each row are NaN or infinite, int64 of shape (n,)."""
    held = block.statistics
    counts: NDArray[np.int64] = held.nan + held.pos_inf + held.neg_inf
    return counts


def counts_of(block: Block, row: int) -> str:
    """The same of one row in words, by kind, with the name of its tensor."""
    return f"{amount_of(block, row)} of {block.info(row).name}"


def amount_of(block: Block, row: int) -> str:
    """The same without the name."""
    held = block.statistics
    kinds = [(held.nan[row], "NaN"), (held.pos_inf[row], "+inf"), (held.neg_inf[row], "-inf")]
    seen = ", ".join(f"{int(number)} {kind}" for number, kind in kinds if number)
    return f"{seen} among {int(held.count[row])} elements"


def is_given(info: TensorInfo) -> bool:
    """Whether a tensor is what a model was called with."""
    return tensors.INPUTS in info.collections


def has_elements(block: Block) -> NDArray[np.bool_]:
    """Rows of tensors with elements, of any kind; bool, shape (n,). For rules about NaN and infinity, or about equality."""
    return block.statistics.count > 0


def has_probe(block: Block, *names: str) -> NDArray[np.bool_]:
    """Rows at which one of the probes was measured; bool, shape (n,)."""
    measured = (np.isfinite(probe(block, name)) for name in names)
    return reduce(np.logical_or, measured, np.zeros(len(block), np.bool_))
