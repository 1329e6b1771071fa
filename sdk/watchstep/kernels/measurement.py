"""Measurements: the protocol of a kernel's result, and cached, completed, reordered, merged, rescaled or repeated results."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from watchstep.format.statistics import BIN_RANGE, COUNT_COLUMNS, Counts, StatisticsBatch, merge_rows


class Measurement(Protocol):
    """Statistics that a device may still be computing."""

    @property
    def nonfinite(self) -> bool | None:
        """Return whether some element is NaN or infinite; None while the answer would require waiting."""
        ...

    def collect(self) -> StatisticsBatch:
        """Wait for the device, and return the statistics, one row per tensor. Not called on the training thread."""
        ...


class Kernel(Protocol):
    """Measures tensors. It does not change them, and does not synchronize the training stream."""

    def measure(self, tensors: Sequence[Any]) -> Measurement:
        """Start a measurement. The tensors may change after this returns (on a device: in stream order).

        Args:
            tensors: Tensors of any shape, dtype and layout of the framework.
        """
        ...


@dataclass(frozen=True)
class Merged:
    """Merged rows of disjoint parts.

    Attributes:
        parts: Measurements of one row each.
        owners: Tensor of each part, 0 … tensors - 1.
        tensors: Number of rows of the result.
    """

    parts: Sequence[Measurement]
    owners: Sequence[int]
    tensors: int

    @property
    def nonfinite(self) -> bool | None:
        """Return whether some element is NaN or infinite; None while no part has one and some part is unknown."""
        flags = [part.nonfinite for part in self.parts]
        return True if True in flags else None if None in flags else False

    def collect(self) -> StatisticsBatch:
        """Wait for the device, and return the statistics, one row per tensor."""
        rows = StatisticsBatch.concatenate([part.collect() for part in self.parts])
        return merge_rows(rows, np.array(self.owners, np.intp), self.tensors)


class Cached:
    """Collects a measurement on the first request, and caches the statistics."""

    def __init__(self, measurement: Measurement) -> None:
        self._measurement = measurement
        self._lock = threading.Lock()
        self._collected: StatisticsBatch | None = None

    @property
    def nonfinite(self) -> bool | None:
        """Return whether some element is NaN or infinite; None while the answer would require waiting."""
        return self._measurement.nonfinite

    def collect(self) -> StatisticsBatch:
        """Return the statistics."""
        with self._lock:
            if self._collected is None:
                self._collected = self._measurement.collect()
            return self._collected


@dataclass(frozen=True)
class Completed:
    """Completed statistics."""

    statistics: StatisticsBatch

    @property
    def nonfinite(self) -> bool | None:
        """Return whether some element is NaN or infinite."""
        return bool(self.statistics.nonfinite.any())

    @property
    def bytes(self) -> int:
        """Size of the statistics in memory."""
        return self.statistics.bytes

    def collect(self) -> StatisticsBatch:
        """Return the statistics."""
        return self.statistics


@dataclass(frozen=True)
class Rescaled:
    """Statistics of the tensors divided by a number.

    For a power of two this is exact, except outside the range of float64. For another number, sums and extremes are within
    rounding, and an element may be counted in an adjacent bin.

    Attributes:
        measurement: Measurement of the undivided tensors.
        scale: Returns the number, which is positive. It may wait for a device, and is not called on the training thread.
    """

    measurement: Measurement
    scale: Callable[[], float]

    @property
    def nonfinite(self) -> bool | None:
        """Return whether some element is NaN or infinite; None while the answer would require waiting."""
        return self.measurement.nonfinite

    def collect(self) -> StatisticsBatch:
        """Wait for the device, and return the statistics."""
        statistics, scale = self.measurement.collect(), self.scale()
        lower, upper = BIN_RANGE
        bins = statistics.histogram.bins.astype(np.int64) - 2 * (math.frexp(scale)[1] - 1)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            factor = np.float64(1.0) / scale
            linear = {
                name: getattr(statistics, name) * factor
                for name in ("min", "max", "abs_min", "mean", "abs_sum")
            }
            squared = {name: getattr(statistics, name) * factor * factor for name in ("m2", "square_sum")}
        histogram = replace(statistics.histogram, bins=np.clip(bins, lower, upper).astype(np.int16))
        return replace(statistics, **linear, **squared, histogram=histogram)


@dataclass(frozen=True)
class Repeated:
    """Statistics of tensors that repeat the elements of smaller ones, as ``torch.Tensor.expand`` makes them.

    Attributes:
        measurement: Measurement of the smaller tensors.
        factors: Number of repetitions of each, int64 of shape (n,).
    """

    measurement: Measurement
    factors: Counts

    @property
    def nonfinite(self) -> bool | None:
        """Return whether some element is NaN or infinite; None while the answer would require waiting."""
        return self.measurement.nonfinite

    def collect(self) -> StatisticsBatch:
        """Wait for the device, and return the statistics."""
        statistics, factors = self.measurement.collect(), self.factors
        counts = {name: getattr(statistics, name) * factors for name in COUNT_COLUMNS}
        sums = {name: getattr(statistics, name) * factors for name in ("m2", "abs_sum", "square_sum")}
        histogram = statistics.histogram
        scaled = histogram.counts * np.repeat(factors, np.diff(histogram.offsets))
        return replace(statistics, **counts, **sums, histogram=replace(histogram, counts=scaled))


@dataclass(frozen=True)
class Reordered:
    """Measurements with rows in the requested order.

    Attributes:
        parts: Measurements in progress.
        order: For each row of the result, its index among the rows of the concatenated parts.
    """

    parts: tuple[Measurement, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[Sequence[int], Measurement]]) -> Reordered:
        """Return the measurement of parts, each with its row indices in the result. Together the parts have each row once."""
        rows = [row for places, _ in parts for row in places]
        order = sorted(range(len(rows)), key=rows.__getitem__)
        return cls(tuple(measurement for _, measurement in parts), tuple(order))

    @property
    def nonfinite(self) -> bool | None:
        """Return whether some element is NaN or infinite; None while no part has one and some part is unknown."""
        flags = [part.nonfinite for part in self.parts]
        return True if True in flags else None if None in flags else False

    def collect(self) -> StatisticsBatch:
        """Wait for every device, and return the statistics, one row per tensor."""
        rows = StatisticsBatch.concatenate([part.collect() for part in self.parts])
        return rows.take(np.array(self.order, np.intp))
