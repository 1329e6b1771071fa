"""The compiled kernel: one pass over many tensors in host memory, outside the GIL.

The build of the package compiles it if there is a C compiler. Otherwise `load` returns None, and numpy is used.
Counts, extremes and histograms are exact. Sums use at most 64 float32 additions per lane before float64:
``abs_sum`` and ``square_sum`` carry a relative error of at most 4e-6, ``mean`` of 4e-6 of the mean magnitude, ``m2`` of
8e-6. float64 tensors are summed in float64.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import COUNT_COLUMNS, VALUE_COLUMNS, Histograms, StatisticsBatch

LIBRARY = Path(__file__).parent / "native" / "_statistics.so"

Kind = Literal["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
KINDS: dict[Kind, int] = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "bfloat16": 3,
    "float8_e4m3fn": 4,
    "float8_e5m2": 5,
}
"""Numbers of the element types in the kernel."""

KIND_OF_WIDTH = {1: KINDS["float8_e5m2"], 2: KINDS["float16"], 4: KINDS["float32"], 8: KINDS["float64"]}
"""A kind for each element size in bytes, for checksums, which need only the size."""

_BINS = 600
_BINS_FLOAT64 = 4300
_FLOAT64 = KINDS["float64"]
_COUNTS, _VALUES = len(COUNT_COLUMNS), len(VALUE_COLUMNS)


class MemoryRange(NamedTuple):
    """Memory location of a dense tensor.

    Attributes:
        address: Address of its first element. The caller keeps the memory alive.
        elements: Number of elements, contiguous in any order.
        kind: A number in `KINDS`.
    """

    address: int
    elements: int
    kind: int


class MemoryRanges(NamedTuple):
    """Memory locations of dense tensors, by column: addresses, numbers of elements, and kinds as in `MemoryRange`."""

    addresses: list[int]
    sizes: list[int]
    kinds: list[int]


class NativeMeasurement:
    """Figures as written by the library. `collect` converts them to columns outside the training thread.

    Attributes:
        nonfinite: Whether some element is NaN or infinite.
    """

    def __init__(self, figures: NDArray[np.int64], rows: int, *, nonfinite: bool) -> None:
        self._figures = figures
        self._rows = rows
        self.nonfinite: bool | None = nonfinite

    @property
    def bytes(self) -> int:
        """Size of the figures in memory."""
        return self._figures.nbytes

    def collect(self) -> StatisticsBatch:
        """Return the statistics."""
        rows, figures = self._rows, self._figures
        ends = np.cumsum([_COUNTS * rows, _VALUES * rows, rows + 1])
        counts, values, offsets, histogram = np.split(figures, ends)
        used = int(offsets[-1])
        bins = histogram[used:].view(np.int16)[:used]
        return StatisticsBatch.from_matrices(
            counts.reshape(-1, _COUNTS),
            values.view(np.float64).reshape(-1, _VALUES),
            Histograms(offsets, bins, histogram[:used]),
        )


class NativeKernel:
    """The loaded library. Thread-safe."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._local = threading.local()
        self._measure = library.watchstep_measure
        pointers = [ctypes.c_void_p] * 3
        self._measure.argtypes = [ctypes.c_int64, *pointers, ctypes.c_int64, *[ctypes.c_void_p] * 5]
        self._measure.restype = ctypes.c_int64
        self._nonfinite = library.watchstep_nonfinite
        self._nonfinite.argtypes = [ctypes.c_int64, *pointers, ctypes.c_int64, ctypes.c_int64]
        self._nonfinite.restype = ctypes.c_int64
        self._checksum = library.watchstep_checksum
        self._checksum.argtypes = [ctypes.c_int64, *pointers, ctypes.c_void_p]
        self._checksum.restype = ctypes.c_int64

    def has_nonfinite(self, tensors: Sequence[MemoryRange], turn: int, slices: int) -> bool:
        """Return whether some tensor contains NaN or infinity.

        Args:
            tensors: The tensors. Those of at most 16,384 elements are checked completely.
            turn: Index of the slice of larger tensors.
            slices: Number of slices.
        """
        return self.any_nonfinite(_by_column(tensors), turn, slices)

    def any_nonfinite(self, tensors: MemoryRanges, turn: int = 0, slices: int = 1) -> bool:
        """Return whether some tensor contains NaN or infinity, as `has_nonfinite`."""
        addresses, sizes, kinds = tensors
        rows = len(addresses)
        if not rows:
            return False
        columns = array("q", [*addresses, *sizes, *kinds])  # is created faster than an array of NumPy
        start = columns.buffer_info()[0]
        return bool(self._nonfinite(rows, start, start + 8 * rows, start + 16 * rows, turn, slices))

    def is_nonfinite(self, tensor: MemoryRange) -> bool:
        """Return whether a tensor contains NaN or infinity. Faster than `has_nonfinite` for a single one."""
        columns = (ctypes.c_int64 * 3)(*tensor)
        start = ctypes.addressof(columns)
        return bool(self._nonfinite(1, start, start + 8, start + 16, 0, 1))

    def measure(self, tensors: Sequence[MemoryRange], *, histogram: bool = True) -> NativeMeasurement:
        """Measure tensors, one row each.

        Args:
            tensors: Memory of the tensors.
            histogram: Whether to compute histograms. False leaves them empty, except for float64.

        Raises:
            ValueError: A kind is unknown.
        """
        return self.measure_ranges(_by_column(tensors), histogram=histogram)

    def measure_ranges(self, tensors: MemoryRanges, *, histogram: bool = True) -> NativeMeasurement:
        """Measure tensors, as `measure`.

        Called for every measured pass and update: with hundreds of small tensors, the conversion of arguments takes most of the time.
        """
        addresses, sizes, kinds = tensors
        rows = len(addresses)
        columns = array("q", [*addresses, *sizes, *kinds])  # is created faster than an array of NumPy
        widths = (_BINS_FLOAT64 if kind == _FLOAT64 else _BINS for kind in kinds)
        max_bins = sum(map(min, sizes, widths))
        lengths = (0, _COUNTS * rows, _VALUES * rows, rows + 1, max_bins)
        offsets_of_parts = list(itertools.accumulate(lengths))
        buffer, start = self._buffer(offsets_of_parts[-1] + max_bins)
        counts, values, offsets, index, bins = (start + 8 * offset for offset in offsets_of_parts)
        data = columns.buffer_info()[0]
        nonfinite = self._measure(
            rows,
            data,
            data + 8 * rows,
            data + 16 * rows,
            int(histogram),
            counts,
            values,
            offsets,
            bins,
            index,
        )
        if nonfinite < 0:
            raise _unknown_kind(-nonfinite - 1, kinds[-nonfinite - 1])
        used = int(buffer[offsets_of_parts[3] - 1])
        figures = (
            buffer[: offsets_of_parts[3] + used],
            buffer[offsets_of_parts[4] : offsets_of_parts[4] + (used + 3) // 4],
        )
        return NativeMeasurement(np.concatenate(figures), rows, nonfinite=nonfinite > 0)

    def _buffer(self, numbers: int) -> tuple[NDArray[np.int64], int]:
        """Return a buffer of this thread and its address, reused by later calls: its allocation would cost more than small tensors."""
        memory: tuple[NDArray[np.int64], int] | None = getattr(self._local, "buffer", None)
        if memory is None or len(memory[0]) < numbers:
            allocated = np.empty(numbers, np.int64)
            memory = self._local.buffer = (allocated, allocated.ctypes.data)
        return memory

    def checksums(self, tensors: Sequence[MemoryRange]) -> NDArray[np.int64]:
        """Return checksums of tensors, as defined in `watchstep.kernels.array_kernel`.

        Args:
            tensors: Memory of the tensors, with elements in order. Only the width of a kind is used.

        Raises:
            ValueError: A kind is unknown.
        """
        columns = array("q", itertools.chain(*_by_column(tensors)))
        start, stride = columns.buffer_info()[0], 8 * len(tensors)
        sums = np.empty(len(tensors), np.int64)
        bad = self._checksum(len(tensors), start, start + stride, start + 2 * stride, sums.ctypes.data)
        if bad:
            raise _unknown_kind(bad - 1, tensors[bad - 1].kind)
        return sums


def _unknown_kind(place: int, kind: int) -> ValueError:
    return ValueError(f"tensor {place} has unknown kind {kind}; the known kinds are {KINDS}")


def _by_column(tensors: Sequence[MemoryRange]) -> MemoryRanges:
    return MemoryRanges(*([tensor[column] for tensor in tensors] for column in range(3)))


@functools.cache
def load() -> NativeKernel | None:
    """Return the compiled kernel; None if it was not built or cannot be loaded."""
    try:
        return NativeKernel(ctypes.CDLL(str(LIBRARY)))
    except (OSError, AttributeError):
        return None
