"""The compiled kernel: one pass over many tensors in host memory, outside the GIL.

It is built where there is a C compiler, by the build of the package; elsewhere `load` gives None, and numpy serves.
Counts, extremes and histograms are exact. Sums are of at most 64 float32 additions a lane before float64 takes over:
``abs_sum`` and ``square_sum`` carry a relative error of at most 4e-6, ``mean`` of 4e-6 of the mean magnitude, ``m2`` of
8e-6. float64 tensors are summed in float64.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from watchstep.histogram import Histograms
from watchstep.statistics import COUNT_COLUMNS, VALUE_COLUMNS, StatisticsBatch

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
"""Element types by the kernel's own numbers."""

KIND_OF_WIDTH = {1: KINDS["float8_e5m2"], 2: KINDS["float16"], 4: KINDS["float32"], 8: KINDS["float64"]}
"""A kind with elements of so many bytes: for checksums, which ask no more of it."""

_BINS = 600
_BINS_FLOAT64 = 4300
_FLOAT64 = KINDS["float64"]


@dataclass(frozen=True)
class Memory:
    """Where a dense tensor lies.

    Attributes:
        address: of its first element; whoever calls keeps it alive.
        elements: how many there are, one behind the other in any order.
        kind: a number of `KINDS`.
    """

    address: int
    elements: int
    kind: int


class NativeKernel:
    """The loaded library. Thread-safe; holds nothing."""

    def __init__(self, library: ctypes.CDLL) -> None:
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

    def holds_nonfinite(self, tensors: Sequence[Memory], turn: int, slices: int) -> bool:
        """Whether some tensor holds NaN or infinity.

        Args:
            tensors: those of at most 16,384 elements are looked at whole.
            turn: of larger ones, which slice.
            slices: how many slices there are.
        """
        addresses, sizes, kinds = _columns(tensors)
        held = [array.ctypes.data for array in (addresses, sizes, kinds)]
        return bool(self._nonfinite(len(tensors), *held, turn, slices))

    def measure(self, tensors: Sequence[Memory], *, histogram: bool = True) -> StatisticsBatch:
        """Measure tensors, one row each.

        Args:
            tensors: where they lie.
            histogram: without it, histograms stay empty (but for float64).

        Raises:
            ValueError: a kind is unknown.
        """
        rows = len(tensors)
        addresses, sizes, kinds = _columns(tensors)
        room = int(np.minimum(sizes, np.where(kinds == _FLOAT64, _BINS_FLOAT64, _BINS)).sum())
        counts = np.empty((rows, len(COUNT_COLUMNS)), np.int64)
        values = np.empty((rows, len(VALUE_COLUMNS)), np.float64)
        offsets = np.empty(rows + 1, np.int64)
        bins, held = np.empty(room, np.int16), np.empty(room, np.int64)
        given = [array.ctypes.data for array in (addresses, sizes, kinds)]
        filled = [array.ctypes.data for array in (counts, values, offsets, bins, held)]
        bad = self._measure(rows, *given, int(histogram), *filled)
        if bad:
            raise _unknown_kind(tensors, bad - 1)
        used = int(offsets[-1])
        return StatisticsBatch.from_matrices(counts, values, Histograms(offsets, bins[:used], held[:used]))

    def checksums(self, tensors: Sequence[Memory]) -> NDArray[np.int64]:
        """Checksums of tensors, as `watchstep.kernels.checksum` defines them.

        Args:
            tensors: where they lie, their elements in the order in which they are read; of a kind only the width counts.

        Raises:
            ValueError: a kind is unknown.
        """
        addresses, sizes, kinds = _columns(tensors)
        found = np.empty(len(tensors), np.int64)
        held = [array.ctypes.data for array in (addresses, sizes, kinds, found)]
        bad = self._checksum(len(tensors), *held)
        if bad:
            raise _unknown_kind(tensors, bad - 1)
        return found


def _unknown_kind(tensors: Sequence[Memory], place: int) -> ValueError:
    return ValueError(f"tensor {place} has unknown kind {tensors[place].kind}, known are {KINDS}")


def _columns(
    tensors: Sequence[Memory],
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int32]]:
    return (
        np.array([tensor.address for tensor in tensors], np.uint64),
        np.array([tensor.elements for tensor in tensors], np.int64),
        np.array([tensor.kind for tensor in tensors], np.int32),
    )


@functools.cache
def load() -> NativeKernel | None:
    """The compiled kernel; None where it was not built, or does not load."""
    try:
        return NativeKernel(ctypes.CDLL(str(LIBRARY)))
    except (OSError, AttributeError):
        return None
