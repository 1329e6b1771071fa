"""Checksums of PyTorch tensors on any device, and the probe that records them: one number, exact in float64.

`watchstep.kernels.checksum` defines the checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from watchstep.format.statistics import StatisticsBatch, scalars
from watchstep.kernels import native_kernel
from watchstep.kernels.checksum import BLOCK, DROPPED, MULTIPLIERS, SHIFTS, STEP, checksum_array
from watchstep.kernels.native_kernel import KIND_OF_WIDTH, MemoryRange
from watchstep.pytorch.kernel import _plain
from watchstep.pytorch.probes.staging import OnTheWay

_SLICE = 1024 * BLOCK
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Types of words by bytes of an element."""

_OF_WORD = {torch.uint8: 0xFF, torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF}


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Checksums of the values that this process holds.

    Those of a sparse tensor are of its values alone, without their places; quantised ones are read as their values.

    Args:
        tensors: all on one device, or all on the host; of any dtype, shape and strides.

    Returns:
        int64, shape (n,), on that device: there it is not waited for.

    Raises:
        ValueError: tensors lie on several devices.
    """
    plain = [_plain(tensor) for tensor in tensors]
    devices = {tensor.device for tensor in plain}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"checksums of tensors on {named}: give those of one device at a time")
    if devices - {torch.device("cpu")}:
        return torch.stack([checksum_on_device(tensor) for tensor in plain])
    held = [tensor.contiguous() for tensor in plain]
    native = native_kernel.load()
    if native is None:
        found = [checksum_array(_words(tensor).numpy()) for tensor in held]
        return torch.tensor(found, dtype=torch.int64)
    memories = [
        MemoryRange(tensor.data_ptr(), tensor.numel(), KIND_OF_WIDTH[tensor.element_size()])
        for tensor in held
    ]
    return torch.from_numpy(native.checksums(memories))


@torch.no_grad()
def checksum_on_device(tensor: Tensor) -> Tensor:
    """The checksum by operations on the tensor's device, which are not waited for.

    Takes some 32 MB beside the tensor, and a copy of it where its elements do not lie in the order in which they are read.

    Args:
        tensor: dense and real, of any dtype and shape.

    Returns:
        int64, shape ().
    """
    words, device = _words(tensor.detach().contiguous()), tensor.device
    keys = _mixed(torch.arange(1, BLOCK + 1, device=device) * _signed(STEP)) | 1
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(words), _SLICE):
        part = words[start : start + _SLICE].long().bitwise_and_(_OF_WORD[words.dtype])
        part = functional.pad(part ^ (part >> 16), (0, -len(part) % BLOCK)).view(-1, BLOCK)
        first = start // BLOCK
        order = torch.arange(first + 1, first + 1 + len(part), device=device) * _signed(STEP)
        total += _mixed(part.mul_(keys).sum(1) + order).sum()
    return _shifted(_mixed(total + _signed(len(words) * STEP)), DROPPED)


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):  # of none or one element, which passes for contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(_WORDS[tensor.element_size()])


def _mixed(x: Tensor) -> Tensor:
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = (x ^ _shifted(x, shift)) * _signed(multiplier)
    return x ^ _shifted(x, SHIFTS[-1])


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in: int64 shifts its sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass(frozen=True)
class Checksums:
    """A measurement whose rows hold checksums."""

    figures: OnTheWay
    nonfinite: bool | None = False

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Checksums:
        """The checksums of what this worker holds of each tensor."""
        return cls(OnTheWay(checksums(tensors)))

    def collect(self) -> StatisticsBatch:
        """One row each."""
        return scalars(self.figures.numbers().tolist())
