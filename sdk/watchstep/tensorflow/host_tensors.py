"""Elements of TensorFlow's tensors in host memory, without a copy where that is possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from watchstep.kernels.measurement import Measurement, Rescaled
from watchstep.updates.tensor_values import HostArrays


def host_array(tensor: Any) -> NDArray[Any]:
    """Return the elements of an eager tensor. They are its own memory if that is on the host and of a dtype of NumPy, else a copy.

    TensorFlow does not write to the memory of a tensor that is referenced.
    """
    try:
        return np.asarray(memoryview(tensor))
    except (TypeError, ValueError, BufferError):
        elements: NDArray[Any] = np.asarray(tensor.numpy())
        return elements


def host_values(tensors: Iterable[Any]) -> HostArrays:
    """Return eager tensors as arrays; None remains None. Slices of rows, as of an embedding, are their values."""
    return HostArrays(
        tuple(None if tensor is None else host_array(getattr(tensor, "values", tensor)) for tensor in tensors)
    )


@dataclass(frozen=True)
class ScaledArrays:
    """Arrays that are multiplied by the scale of a loss. Their values are those divided by it.

    Attributes:
        scaled: the arrays.
        scale: the scale, finite and not zero.
    """

    scaled: HostArrays
    scale: float
    is_measured: ClassVar[bool] = False

    def measure(self, rows: Sequence[int]) -> tuple[list[int], Measurement]:
        """Measure some arrays."""
        indices, measurement = self.scaled.measure(rows)
        scale = self.scale
        return indices, Rescaled(measurement, lambda: scale)

    def has_nonfinite(self, turn: int, slices: int) -> bool:
        """Return whether an element is NaN or infinite."""
        return self.scaled.has_nonfinite(turn, slices)

    def array(self, row: int) -> NDArray[Any] | None:
        """Return the elements of an array, divided by the scale."""
        array = self.scaled.array(row)
        if array is None:
            return None
        divided: NDArray[Any] = (array / self.scale).astype(array.dtype)
        return divided
