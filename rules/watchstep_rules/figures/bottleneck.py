"""A GPU that is idle while something else of the machine is at its limit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from watchstep.block import Block
from watchstep.system_figures import is_gpu
from watchstep_rules.figures.system_samples import Recent, by_step, series_name, surely_above, surely_below


class Limits(NamedTuple):
    """When a GPU is idle, and the other figure high.

    Attributes:
        gpu: share below which a GPU is idle.
        other: share from which on the other figure is high.
        window: samples that count.
    """

    gpu: float
    other: float
    window: int


def follow(
    block: Block, recent: dict[str, Recent], names: tuple[str, ...], limits: Limits
) -> list[tuple[int, Recent]]:
    """Take in rows; of each GPU's row, the share of the last samples in which it was idle and the other figure high.

    Of one row it is known how many samples of each were so, not which: where a share a of the one and a share b of the
    other were, at least ``a + b - 1`` were both (Fréchet). What is known surely is counted.

    Args:
        block: whole steps.
        recent: by GPU, changed in place.
        names: of the other figure; of several that were sampled the first counts.
        limits: of both.

    Returns:
        Rows of the block, with what is known as of each.
    """
    held = block.statistics
    count = np.maximum(held.finite, 1)
    idle, high = surely_below(held, limits.gpu) / count, surely_above(held, limits.other) / count
    found = []
    for rows in by_step(block):
        by_name = {block.info(row).name: row for row in rows}
        other = next((by_name[name] for name in names if name in by_name), None)
        if other is None:
            continue
        for row in rows:
            if is_gpu(block.info(row).name) and held.finite[row] and held.finite[other]:
                both, samples = max(0.0, float(idle[row] + high[other] - 1)), int(held.finite[row])
                name = series_name(block, row)
                recent[name] = recent.get(name, Recent()).after(both * samples, samples, limits.window)
                found.append((row, recent[name]))
    return found
