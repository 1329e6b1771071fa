"""Measurements: the protocol of a kernel's result, and results that are cached, completed, reordered, merged, rescaled or repeated."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from watchstep.format.statistics import BIN_RANGE, COUNT_COLUMNS, Counts, StatisticsBatch, merge_rows


class Measurement(Protocol):
    """Statistics that may still be on their way from a device."""

    @property
    def nonfinite(self) -> bool | None:
        """Whether some element is NaN or infinite; None while that is not known without waiting."""
        ...

    def collect(self) -> StatisticsBatch:
        """The statistics, one row a tensor; waits for the device. Called off the training thread."""
        ...


class Kernel(Protocol):
    """Measures tensors. It never changes them, and never synchronises the training stream."""

    def measure(self, tensors: Sequence[Any]) -> Measurement:
        """Start to measure; the tensors may change as soon as this returns (on a device: in stream order).

        Args:
            tensors: of any shape, dtype and layout that the framework has.
        """
        ...


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
        flags = [part.nonfinite for part in self.parts]
        return True if True in flags else None if None in flags else False

    def collect(self) -> StatisticsBatch:
        """The statistics, one row a tensor; waits for the device."""
        rows = StatisticsBatch.concatenate([part.collect() for part in self.parts])
        return merge_rows(rows, np.array(self.owners, np.intp), self.tensors)


class Cached:
    """Collects a measurement when it is first asked for, and keeps the statistics."""

    def __init__(self, measurement: Measurement) -> None:
        self._measurement = measurement
        self._lock = threading.Lock()
        self._collected: StatisticsBatch | None = None

    @property
    def nonfinite(self) -> bool | None:
        """Whether some element is NaN or infinite; None while that is not known without waiting."""
        return self._measurement.nonfinite

    def collect(self) -> StatisticsBatch:
        """The statistics."""
        with self._lock:
            if self._collected is None:
                self._collected = self._measurement.collect()
            return self._collected


@dataclass(frozen=True)
class Completed:
    """Statistics at hand."""

    statistics: StatisticsBatch

    @property
    def nonfinite(self) -> bool | None:
        """Whether some element is NaN or infinite."""
        return bool(self.statistics.nonfinite.any())

    @property
    def bytes(self) -> int:
        """Of the statistics."""
        return self.statistics.bytes

    def collect(self) -> StatisticsBatch:
        """The statistics."""
        return self.statistics


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
        statistics, scale = self.measurement.collect(), self.scale()
        lower, upper = BIN_RANGE
        bins = statistics.histogram.bins.astype(np.int64) - 2 * (math.frexp(scale)[1] - 1)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            by = np.float64(1.0) / scale
            linear = {
                name: getattr(statistics, name) * by for name in ("min", "max", "abs_min", "mean", "abs_sum")
            }
            squared = {name: getattr(statistics, name) * by * by for name in ("m2", "square_sum")}
        histogram = replace(statistics.histogram, bins=np.clip(bins, lower, upper).astype(np.int16))
        return replace(statistics, **linear, **squared, histogram=histogram)


@dataclass(frozen=True)
class Repeated:
    """Statistics of tensors that repeat the elements of smaller ones, as ``torch.Tensor.expand`` makes them.

    Attributes:
        measurement: of the smaller tensors.
        factors: how often each is repeated, int64 of shape (n,).
    """

    measurement: Measurement
    factors: Counts

    @property
    def nonfinite(self) -> bool | None:
        """Whether some element is NaN or infinite; None while that is not known without waiting."""
        return self.measurement.nonfinite

    def collect(self) -> StatisticsBatch:
        """The statistics; waits for the device."""
        statistics, by = self.measurement.collect(), self.factors
        counts = {name: getattr(statistics, name) * by for name in COUNT_COLUMNS}
        sums = {name: getattr(statistics, name) * by for name in ("m2", "abs_sum", "square_sum")}
        histogram = statistics.histogram
        scaled = histogram.counts * np.repeat(by, np.diff(histogram.offsets))
        return replace(statistics, **counts, **sums, histogram=replace(histogram, counts=scaled))


@dataclass(frozen=True)
class Reordered:
    """Measurements whose rows are put back in the order that was asked for.

    Attributes:
        parts: under way.
        order: for each row of the whole, its place among the rows of all parts, one part behind the other.
    """

    parts: tuple[Measurement, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[Sequence[int], Measurement]]) -> Reordered:
        """Measurements with the rows of the whole that each stands for; together they stand for each row once."""
        rows = [row for places, _ in parts for row in places]
        order = sorted(range(len(rows)), key=rows.__getitem__)
        return cls(tuple(measurement for _, measurement in parts), tuple(order))

    @property
    def nonfinite(self) -> bool | None:
        """Whether some element is NaN or infinite; None while no part knows of one and some part knows nothing."""
        flags = [part.nonfinite for part in self.parts]
        return True if True in flags else None if None in flags else False

    def collect(self) -> StatisticsBatch:
        """The statistics, one row a tensor; waits for every device."""
        together = StatisticsBatch.concatenate([part.collect() for part in self.parts])
        return together.take(np.array(self.order, np.intp))
