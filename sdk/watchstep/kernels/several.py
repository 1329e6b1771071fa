"""A measurement of tensors that lie on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from watchstep.kernels.interface import Measurement
from watchstep.statistics import StatisticsBatch


@dataclass(frozen=True)
class Several:
    """Measurements whose rows are put back in the order that was asked for.

    Attributes:
        parts: under way.
        order: for each row of the whole, its place among the rows of all parts, one part behind the other.
    """

    parts: tuple[Measurement, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[Sequence[int], Measurement]]) -> Several:
        """Measurements with the rows of the whole that each stands for; together they stand for each row once."""
        rows = [row for places, _ in parts for row in places]
        order = sorted(range(len(rows)), key=rows.__getitem__)
        return cls(tuple(measurement for _, measurement in parts), tuple(order))

    @property
    def nonfinite(self) -> bool | None:
        """Whether some element is NaN or infinite; None while no part knows of one and some part knows nothing."""
        known = [part.nonfinite for part in self.parts]
        return True if True in known else None if None in known else False

    def collect(self) -> StatisticsBatch:
        """The statistics, one row a tensor; waits for every device."""
        together = StatisticsBatch.concatenate([part.collect() for part in self.parts])
        return together.take(np.array(self.order, np.intp))
