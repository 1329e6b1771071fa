"""Statistics of gradients that a gradient scaler has multiplied, as they are without it. The gradients stay as they are.

By a power of two, which is what `torch.amp.GradScaler` uses unless told otherwise, the statistics are divided: exact,
and no more work than without a scaler. By another number copies in parts of bounded size are divided and measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from watchstep.kernels.interface import Kernel, Measurement
from watchstep.kernels.merged import Merged
from watchstep.kernels.rescaled import Rescaled
from watchstep.pytorch.kernel import device_tensors
from watchstep.pytorch.probes.on_the_way import OnTheWay

_PART = 4 * 1024 * 1024
"""Elements that are copied at once: 16 MB in float32."""


def is_power_of_two(number: float) -> bool:
    """Whether dividing by it only changes exponents."""
    return number > 0 and math.frexp(number)[0] == 0.5


@torch.no_grad()
def measure_unscaled(
    kernel: Kernel, gradients: Sequence[Tensor], scale: Tensor, *, powers_of_two: bool
) -> Measurement:
    """Start to measure.

    Args:
        kernel: measures.
        gradients: of real floating-point types, dense.
        scale: one element, by which they are multiplied.
        powers_of_two: whether the scale is one, where it lies on a device and is not read.
    """
    if scale.device.type == "cpu":
        number = scale.item()
        if is_power_of_two(number):
            return Rescaled(kernel.measure(gradients), lambda: number)
    elif powers_of_two:
        awaited = OnTheWay(scale)
        return Rescaled(kernel.measure(gradients), lambda: float(awaited.numbers()))
    return _by_parts(kernel, gradients, scale)


def _by_parts(kernel: Kernel, gradients: Sequence[Tensor], scale: Tensor) -> Measurement:
    parts, owners = [], []
    tensors = device_tensors(gradients)
    for owner, tensor in enumerate(tensors):
        flat = tensor.as_strided(
            (tensor.numel(),), (1,)
        )  # dense in some order, and the order does not matter
        wide = torch.promote_types(tensor.dtype, torch.float32)
        here = scale.to(device=tensor.device, dtype=wide, non_blocking=True)
        for piece in flat.split(_PART):
            parts.append(kernel.measure([piece.to(wide) / here]))
            owners.append(owner)
    return Merged(parts, owners, len(tensors))
