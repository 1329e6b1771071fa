"""Tensors of PyTorch at an update of a Keras optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from watchstep.kernels import native_kernel
from watchstep.kernels.measurement import Measurement, Rescaled
from watchstep.pytorch.gate import any_is_nonfinite
from watchstep.pytorch.kernel import TorchKernel, native_memory
from watchstep.updates.tensor_values import HostArrays

_kernel = TorchKernel()


def number_of(value: Any) -> float:
    """Return a tensor of one element, or a number, as a number. Waits for a device."""
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


class TorchTensors:
    """Tensors that are multiplied by the scale of a loss, if there is one. Their values are those divided by it."""

    is_measured: ClassVar[bool] = False

    def __init__(self, tensors: Sequence[Tensor | None], scale: float | None = None) -> None:
        """Reference the tensors.

        Args:
            tensors: tensor of each parameter; None for a missing one.
            scale: the scale; None without loss scaling.
        """
        self._tensors = [None if tensor is None else tensor.detach() for tensor in tensors]
        self._scale = scale

    def measure(self, rows: Sequence[int]) -> tuple[list[int], Measurement]:
        """Measure some tensors."""
        existing = [(row, tensor) for row in rows if (tensor := self._tensors[row]) is not None]
        measurement = _kernel.measure([tensor for _, tensor in existing])
        scale = self._scale
        if scale is not None:
            measurement = Rescaled(measurement, lambda: scale)
        return [row for row, _ in existing], measurement

    def has_nonfinite(self, turn: int, slices: int) -> bool:
        """Return whether an element is NaN or infinite. Waits for a device."""
        tensors = [tensor for tensor in self._tensors if tensor is not None]
        native, ranges = native_kernel.load(), native_memory(tensors)
        if native is not None and ranges is not None:
            return native.has_nonfinite(ranges, turn, slices)
        return any_is_nonfinite(tensors)

    def array(self, row: int) -> NDArray[Any] | None:
        """Return a copy of the elements of a tensor; bfloat16 as float32."""
        tensor = self._tensors[row]
        if tensor is None:
            return None
        if self._scale is not None:
            tensor = tensor / self._scale
        if tensor.dtype is torch.bfloat16:
            tensor = tensor.float()
        return HostArrays((tensor.cpu().numpy().copy(),)).array(0)
