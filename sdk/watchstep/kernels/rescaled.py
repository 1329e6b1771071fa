"""A measurement of tensors that are all multiplied by one number, read as if they were not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from watchstep.histogram import BIN_RANGE
from watchstep.kernels.interface import Measurement
from watchstep.statistics import StatisticsBatch


@dataclass(frozen=True)
class Rescaled:
    """Statistics of the tensors divided by a number.

    By a power of two this is exact, but for what float64 cannot hold. By another number sums and extremes are within
    rounding, and an element may be counted one bin beside its own.

    Attributes:
        measurement: of the tensors as they are.
        scale: gives the number, above zero; may wait for a device, and is asked off the training thread.
    """

    measurement: Measurement
    scale: Callable[[], float]

    @property
    def nonfinite(self) -> bool | None:
        """Whether some element is NaN or infinite; None while that is not known without waiting."""
        return self.measurement.nonfinite

    def collect(self) -> StatisticsBatch:
        """The statistics; waits for the device."""
        held, scale = self.measurement.collect(), self.scale()
        lower, upper = BIN_RANGE
        bins = held.histogram.bins.astype(np.int64) - 2 * (math.frexp(scale)[1] - 1)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            by = np.float64(1.0) / scale
            linear = {name: getattr(held, name) * by for name in ("min", "max", "abs_min", "mean", "abs_sum")}
            squared = {name: getattr(held, name) * by * by for name in ("m2", "square_sum")}
        histogram = replace(held.histogram, bins=np.clip(bins, lower, upper).astype(np.int16))
        return replace(held, **linear, **squared, histogram=histogram)
