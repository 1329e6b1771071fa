"""Numbers that are tensors: recorded without reading them on the training thread."""

from __future__ import annotations

from torch import Tensor

from watchstep.capture.recorder import Recorder
from watchstep.pytorch.kernel import TorchKernel
from watchstep.tensors import Mode


def record_tensor(recorder: Recorder, name: str, value: Tensor, mode: Mode, *, derived: bool = False) -> None:
    """Record a tensor of one element.

    Raises:
        ValueError: it has another number of elements.
    """
    if value.numel() != 1:
        raise ValueError(f"a tensor of shape {tuple(value.shape)}: log one number, e.g. its mean")
    if value.device.type == "cpu":
        recorder.scalar(name, value.detach().item(), mode, derived=derived)
        return
    recorder.awaited_scalar(name, TorchKernel().measure([value]), mode, derived=derived)
