"""Numbers that a device is still computing, as arrays with ``copy_to_host_async``: those of JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from watchstep.format.statistics import StatisticsBatch, merge_rows, scalars
from watchstep.kernels.measurement import Measurement


@dataclass(frozen=True)
class ArrivingNumber:
    """Numbers in arrays of shape (), which are read outside of the training thread.

    Attributes:
        arrays: the arrays.
    """

    arrays: tuple[Any, ...]

    @classmethod
    def of(cls, array: Any) -> ArrivingNumber:
        """Start to copy a number to the host.

        Raises:
            TypeError: the array has several elements.
        """
        if array.size != 1:
            raise TypeError(f"an array of shape {tuple(array.shape)} is not a number: log its mean")
        array.copy_to_host_async()
        return cls((array,))

    def measure(self) -> Measurement:
        """Return the numbers as one row of statistics."""
        return self

    def copy(self) -> ArrivingNumber:
        """Return itself: such arrays never change."""
        return self

    def measure_all(self, scalars: Sequence[Any]) -> Measurement:
        """Return several numbers as one row of statistics."""
        return ArrivingNumber(tuple(array for scalar in scalars for array in scalar.arrays))

    @property
    def nonfinite(self) -> bool | None:
        """Return whether a number is NaN or infinite; None while one is still computed."""
        if not all(array.is_ready() for array in self.arrays):
            return None
        return not all(map(math.isfinite, self._values()))

    def collect(self) -> StatisticsBatch:
        """Wait for the device, and return the statistics, as one row."""
        values = self._values()
        return merge_rows(scalars(values), np.zeros(len(values), np.intp), 1)

    def _values(self) -> list[float]:
        return [float(np.asarray(array).reshape(())) for array in self.arrays]
