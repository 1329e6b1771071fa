"""Growth that goes on and on, told from a step, from a plateau that is reached, and from ups and downs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep_rules.signals.series import Trail
from watchstep_rules.signals.system_samples import means


class Growth(NamedTuple):
    """What the last rows of each series did, one entry for each row of a block.

    Attributes:
        began: median of the first quarter of the rows.
        risen: by how much the median of the last quarter is above that; NaN where there are too few rows.
        is_steady: every quarter's median is above that of the quarter before, by half of an even share at least.
    """

    began: Floats
    risen: Floats
    is_steady: NDArray[np.bool_]


def whole_quarters(window: int) -> int:
    """How many of so many rows can be looked at in four equal parts; 4 at least."""
    return 4 * max(1, window // 4)


def growth(context: Block, block: Block, width: int) -> Growth:
    """The growth of each row's mean over the last rows of its series.

    A leak adds about as much in each quarter of the time; a cache that fills, or one large allocation, does not, and medians
    do not see peaks that go away.

    Args:
        context: earlier rows; the rule looks back on ``width`` of them.
        block: n rows.
        width: how many rows count, the row itself included, as `whole_quarters` gives it.
    """
    quarter = width // 4
    trail = Trail.of(context, block)
    column = trail.column(means)
    back = [trail.back(column, row) for row in reversed(range(width))]
    medians = np.median(np.reshape(back, (4, quarter, len(block))), axis=1)
    risen = medians[3] - medians[0]
    with np.errstate(invalid="ignore"):
        is_steady = (np.diff(medians, axis=0) >= risen / 6).all(axis=0) & (risen > 0)
    return Growth(medians[0], risen, is_steady)
