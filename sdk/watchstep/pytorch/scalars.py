"""Numbers that are tensors: recorded without reading them on the training thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from watchstep.capture.recorder import Recorder
from watchstep.kernels.interface import Measurement
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.loss_functions import loss_function
from watchstep.tensors import Mode


@dataclass(frozen=True)
class TensorScalar:
    """A tensor of one element in a device's memory."""

    tensor: Tensor

    def measure(self) -> Measurement:
        """Start to measure it."""
        return TorchKernel().measure([self.tensor])

    def copy(self) -> TensorScalar:
        """The number as it is now."""
        return TensorScalar(self.tensor.detach().reshape(()).clone())

    def measure_all(self, scalars: Sequence[TensorScalar]) -> Measurement:
        """Start to measure several as one tensor."""
        with torch.no_grad():
            return TorchKernel().measure([torch.stack([scalar.tensor for scalar in scalars])])


def record_tensor(
    recorder: Recorder, name: str, value: Tensor, mode: Mode, *, derived: bool = False, replaces: bool = False
) -> None:
    """Record a tensor of one element; where it is still on its graph, the function that computed it is recorded too.

    Raises:
        ValueError: it has another number of elements.
    """
    if value.numel() != 1:
        raise ValueError(f"a tensor of shape {tuple(value.shape)}: log one number, e.g. its mean")
    recorder.note_function(name, mode, loss_function(value))
    if value.device.type == "cpu":
        recorder.scalar(name, value.detach().item(), mode, derived=derived, replaces=replaces)
        return
    recorder.device_scalar(name, TensorScalar(value), mode, derived=derived, replaces=replaces)
