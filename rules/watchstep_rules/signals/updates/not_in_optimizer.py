"""Parameters that get gradients and that no optimizer holds: which were forgotten, and which were left out on purpose."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep_rules.signals.layers import is_weighted

_PART = 0.25


class OptimizedWeights(NamedTuple):
    """The weights that optimizers update.

    Attributes:
        elements: of all of them together; 0 where none is known.
        first: the place of the first weighted layer among them, in the order of layers.
    """

    elements: int = 0
    first: int = -1

    def with_updates(self, block: Block, rows: list[int]) -> OptimizedWeights:
        """With the updates of a step; of several optimizers the largest step counts."""
        infos = {block.info(row).name: block.info(row) for row in rows}
        elements = sum(int(np.prod(info.shape)) for info in infos.values())
        orders = [info.order for info in infos.values() if is_weighted(info) and len(info.shape) > 1]
        first = min([*orders, *([self.first] if self.first >= 0 else [])], default=-1)
        return OptimizedWeights(max(self.elements, elements), first)


def forgotten(block: Block, rows: NDArray[np.intp], held: OptimizedWeights) -> list[int]:
    """Which of a step's parameters in no optimizer their author forgot.

    They get a gradient and have not changed since they were first looked at. Where no optimizer holds anything of the
    model, these are all. Where one does, weighted layers are forgotten that come after one that learns, and only if what
    is held is a quarter of all or more: who tunes a prompt, an adapter or a head leaves out most of a model on purpose, and
    who leaves out its beginning too.

    Args:
        block: the rows.
        rows: of one step.
        held: what optimizers hold.
    """
    changed = block.probes.get("changed")
    if changed is None:
        return []
    left = [
        row
        for row in map(int, rows)
        if block.info(row).role == "not_in_optimizer"
        and len(block.info(row).shape) > 1
        and block.statistics.abs_sum[row] > 0
        and changed[row] == 0
    ]
    if not held.elements:
        return left
    elements = sum(int(np.prod(block.info(row).shape)) for row in left)
    if held.elements < _PART * (held.elements + elements) or held.first < 0:
        return []
    return [row for row in left if is_weighted(block.info(row)) and block.info(row).order > held.first]
