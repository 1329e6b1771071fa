"""Measurements of the parts of tensors, as one of the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from watchstep.kernels.interface import Measurement
from watchstep.statistics import StatisticsBatch, merge_rows


@dataclass(frozen=True)
class Merged:
    """Rows of disjoint parts, merged.

    Attributes:
        parts: of one row each.
        owners: the tensor that each is a part of, 0 … tensors - 1.
        tensors: how many rows the whole has.
    """

    parts: Sequence[Measurement]
    owners: Sequence[int]
    tensors: int

    @property
    def nonfinite(self) -> bool | None:
        """Whether some element is NaN or infinite; None while no part knows of one and some part knows nothing."""
        known = [part.nonfinite for part in self.parts]
        return True if True in known else None if None in known else False

    def collect(self) -> StatisticsBatch:
        """The statistics, one row a tensor; waits for the device."""
        rows = StatisticsBatch.concatenate([part.collect() for part in self.parts])
        return merge_rows(rows, np.array(self.owners, np.intp), self.tensors)
