"""The tensors of one role at one update: arrays in host memory, or figures that a device has computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from watchstep.capture.given.arrays import measure, memory_of
from watchstep.format.statistics import StatisticsBatch
from watchstep.kernels import native_kernel
from watchstep.kernels.measurement import Completed, Measurement, Reordered
from watchstep.kernels.native_kernel import MemoryRange


class TensorValues(Protocol):
    """The tensors of one role at one update, in the order of the parameters. A tensor may be missing."""

    @property
    def is_measured(self) -> bool:
        """Whether a device has measured them at a cadence of its own: they are recorded whether they are due or not."""
        ...

    def measure(self, rows: Sequence[int]) -> tuple[list[int], Measurement]:
        """Measure some tensors.

        Args:
            rows: indices of the parameters.

        Returns:
            The indices of those that exist, and their statistics, one row each.
        """
        ...

    def has_nonfinite(self, turn: int, slices: int) -> bool:
        """Return whether an element is NaN or infinite.

        Args:
            turn: index of the slice of large tensors that is checked.
            slices: number of slices; 1 checks everything.
        """
        ...

    def array(self, row: int) -> NDArray[Any] | None:
        """Return the elements of a tensor in host memory; None if it is missing, or only figures exist."""
        ...


@dataclass(frozen=True)
class HostArrays:
    """Arrays in host memory.

    Attributes:
        arrays: array of each parameter, of any shape; None for a missing one. They may share the framework's memory.
    """

    arrays: tuple[NDArray[Any] | None, ...]
    is_measured: ClassVar[bool] = False

    def measure(self, rows: Sequence[int]) -> tuple[list[int], Measurement]:
        """Measure some arrays. The statistics are complete when this returns."""
        existing = [(row, array) for row in rows if (array := self.arrays[row]) is not None]
        indices = [row for row, _ in existing]
        native = native_kernel.load()
        ranges = [memory_of(array) for _, array in existing]
        if native is not None and all(ranges):
            return indices, native.measure([part for memory in ranges for part in memory or ()])
        parts = tuple(measure(array) for _, array in existing)
        return indices, Reordered(parts, tuple(range(len(parts))))

    def has_nonfinite(self, turn: int, slices: int) -> bool:
        """Return whether an element is NaN or infinite."""
        native = native_kernel.load()
        ranges: list[MemoryRange] = []
        for array in self.arrays:
            if array is None or not array.size:
                continue
            memory = memory_of(array) if native is not None else None
            if memory is None:
                if not _is_finite(array):
                    return True
            else:
                ranges.extend(memory)
        return bool(native is not None and ranges and native.has_nonfinite(ranges, turn, slices))

    def array(self, row: int) -> NDArray[Any] | None:
        """Return an array."""
        return self.arrays[row]


def _is_finite(array: NDArray[Any]) -> bool:
    """Return whether an array that the compiled kernel cannot read has only finite elements; True for integers."""
    if array.dtype.kind in "biu":
        return True
    wide = array if array.dtype.kind in "fc" else array.astype(np.float32)
    return bool(np.isfinite(wide).all())


@dataclass(frozen=True)
class MeasuredRows:
    """Figures that a device has computed.

    Attributes:
        statistics: one row for each parameter that was measured.
        parameters: indices of these parameters, ascending; None if all were measured.
    """

    statistics: StatisticsBatch
    parameters: tuple[int, ...] | None = None
    is_measured: ClassVar[bool] = True

    def measure(self, rows: Sequence[int]) -> tuple[list[int], Measurement]:
        """Return the rows of some tensors."""
        if self.parameters is not None:
            places = {row: place for place, row in enumerate(self.parameters)}
            rows = [row for row in rows if row in places]
            return rows, Completed(self.statistics.take(np.array([places[row] for row in rows], np.intp)))
        return list(rows), Completed(self.statistics.take(np.array(rows, np.intp)))

    def has_nonfinite(self, turn: int, slices: int) -> bool:  # noqa: ARG002 - all elements are counted
        """Return whether an element is NaN or infinite."""
        return bool(self.statistics.nonfinite.any())

    def array(self, row: int) -> NDArray[Any] | None:  # noqa: ARG002 - as above
        """Return None."""
        return None


@dataclass(frozen=True)
class PartialValues:
    """The tensors of an update of some of the parameters.

    Attributes:
        values: the tensors, in the order of the update.
        rows: index of the parameter of each.
    """

    values: TensorValues
    rows: Sequence[int]

    @property
    def is_measured(self) -> bool:
        """Whether a device has measured them."""
        return self.values.is_measured

    def measure(self, rows: Sequence[int]) -> tuple[list[int], Measurement]:
        """Measure some tensors."""
        places = {row: place for place, row in enumerate(self.rows)}
        indices, measurement = self.values.measure([places[row] for row in rows if row in places])
        return [self.rows[place] for place in indices], measurement

    def has_nonfinite(self, turn: int, slices: int) -> bool:
        """Return whether an element is NaN or infinite."""
        return self.values.has_nonfinite(turn, slices)

    def array(self, row: int) -> NDArray[Any] | None:
        """Return the elements of a tensor."""
        return self.values.array(self.rows.index(row)) if row in self.rows else None
