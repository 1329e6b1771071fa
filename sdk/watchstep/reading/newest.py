"""The default view of a run that went back: for each step, the newest attempt that has it."""

from __future__ import annotations

import numpy as np

from watchstep.block import Block, concatenate


def newest_of_each_step(attempts: list[Block]) -> Block:
    """Rows of several attempts, oldest first, without those that a later attempt did again.

    An attempt that starts at step s replaces every earlier row from s on.
    """
    kept: list[Block] = []
    cut = np.iinfo(np.int64).max
    for block in reversed([block for block in attempts if len(block)]):
        part = block.where(block.step < cut)
        kept.append(part)
        cut = min(cut, int(block.step.min()))
    return concatenate(kept[::-1]).ordered()
