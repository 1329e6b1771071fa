"""Statistics and checksums of PyTorch tensors on any device.

Statistics of PyTorch tensors: host memory by the compiled kernel or numpy, devices by theirs.

On a device everything is computed there and copied without synchronising the stream; `collect` waits for the copy, on
the writer's thread.

Checksums of PyTorch tensors on any device, and the probe that records them: one number, exact in float64.

`watchstep.kernels.array_kernel` defines the checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from watchstep.format.statistics import StatisticsBatch, scalars
from watchstep.kernels import native_kernel
from watchstep.kernels.array_kernel import (
    BLOCK,
    DROPPED,
    MULTIPLIERS,
    SHIFTS,
    STEP,
    checksum_array,
    measure_array,
)
from watchstep.kernels.measurement import Completed, Measurement, Reordered, Repeated
from watchstep.kernels.native_kernel import KIND_OF_WIDTH, KINDS, MemoryRange
from watchstep.pytorch import device_kernel
from watchstep.pytorch.device_kernel import measure_by_operations
from watchstep.pytorch.probes.staging import OnTheWay


class TorchKernel:
    """Measures dense and sparse tensors of every real dtype; complex ones as their real and imaginary parts."""

    def measure(self, tensors: Sequence[Tensor]) -> Measurement:
        """Start to measure.

        Args:
            tensors: on any devices, mixed too.

        Raises:
            DeviceError: a CUDA graph is being captured on the current stream.
        """
        collapsed = [_collapsed(_plain(tensor)) for tensor in tensors]
        factors = np.array([factor for _, factor in collapsed], np.int64)
        measurement = self._measure_collapsed([tensor for tensor, _ in collapsed])
        return measurement if (factors == 1).all() else Repeated(measurement, factors)

    def _measure_collapsed(self, plain: list[Tensor]) -> Measurement:
        devices = {tensor.device for tensor in plain}
        if len(devices) <= 1:
            return _measure(plain)
        parts = []
        for device in sorted(devices, key=str):
            places = [place for place, tensor in enumerate(plain) if tensor.device == device]
            parts.append((places, _measure([plain[place] for place in places])))
        return Reordered.of(parts)


def _measure(plain: list[Tensor]) -> Measurement:
    """Tensors of one device."""
    if plain and plain[0].device.type != "cpu":
        return device_kernel.measure([_dense(tensor) for tensor in plain])
    if any(type(tensor) is not Tensor for tensor in plain):  # they hold their values in tensors of their own
        return measure_by_operations(plain)
    native = native_kernel.load()
    if native is not None and all(tensor.dtype in _NATIVE for tensor in plain):
        dense = [_dense(tensor) for tensor in plain]
        return native.measure([_memory(tensor) for tensor in dense])
    return Completed(StatisticsBatch.concatenate([measure_array(_as_array(tensor)) for tensor in plain]))


def device_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a device's kernel takes: the values that this process holds, dense in any order."""
    return [_dense(_plain(tensor)) for tensor in tensors]


def distinct_elements(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As `device_tensors`, without repetitions of elements: enough to find one that is not finite."""
    return [_dense(_collapsed(_plain(tensor))[0]) for tensor in tensors]


def native_memory(tensors: Sequence[Tensor]) -> list[MemoryRange] | None:
    """Where tensors lie that the compiled kernel can take as they are; None where one of them is of another sort.

    Asked of every gradient at every step: a microsecond here is felt where there are thousands.
    """
    ranges = []
    for tensor in tensors:
        local = tensor if type(tensor) in _PLAIN_TYPES else _plain(tensor)
        kind = _NATIVE.get(local.dtype)
        if kind is None or not local.is_cpu:
            return None
        if type(local) in _PLAIN_TYPES and not _has_memory(local):
            ranges.append(MemoryRange(0, 0, kind))
            continue
        if not _is_dense(local):
            return None
        ranges.append(MemoryRange(local.data_ptr(), local.numel(), kind))
    return ranges


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all elements are finite, by operations: of tensors in host memory that the compiled kernel does not take."""
    return all(bool(torch.isfinite(_comparable(_collapsed(_plain(tensor))[0])).all()) for tensor in tensors)


def _comparable(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that ``torch.isfinite`` takes: there is none for fp8."""
    return tensor.float() if tensor.element_size() == 1 else tensor


def _memory(tensor: Tensor) -> MemoryRange:
    return MemoryRange(tensor.data_ptr(), tensor.numel(), _NATIVE[tensor.dtype])


_NATIVE = {getattr(torch, name): kind for name, kind in KINDS.items()}


def _dense(tensor: Tensor) -> Tensor:
    """The tensor where its elements lie one behind the other in any order, else a copy that does."""
    return tensor if _is_dense(tensor) else tensor.contiguous()


def _collapsed(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor without the dimensions along which it repeats its elements, and how often it repeats them.

    An expanded tensor of a few bytes may stand for gigabytes, which a copy would take.
    """
    if type(tensor) is not Tensor or 0 not in tensor.stride():
        return tensor, 1
    factor = 1
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
            factor *= size
    return tensor, factor


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements are there: programs free the storage of one that they compute anew, and keep its shape."""
    return tensor.layout is not torch.strided or not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def _is_dense(tensor: Tensor) -> bool:
    if type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    if tensor.dim() == _IMAGES:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() > 1 and tensor.transpose(-1, -2).is_contiguous()


_IMAGES = 4
_PLAIN_TYPES = {Tensor, torch.nn.Parameter}


def _plain(tensor: Tensor) -> Tensor:
    """The values that this process holds, as a dense real tensor that shares memory where it can; none where they were freed."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if type(tensor) is not Tensor and not is_traceable_wrapper_subclass(tensor):
        tensor = tensor.as_subclass(Tensor)
    if type(tensor) is Tensor and not _has_memory(tensor):
        return tensor.new_empty(0)
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype.is_floating_point and tensor.dtype not in {torch.float32, torch.float64}:
        tensor = tensor.float()
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


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
    contiguous = [tensor.contiguous() for tensor in plain]
    native = native_kernel.load()
    if native is None:
        sums = [checksum_array(_words(tensor).numpy()) for tensor in contiguous]
        return torch.tensor(sums, dtype=torch.int64)
    memories = [
        MemoryRange(tensor.data_ptr(), tensor.numel(), KIND_OF_WIDTH[tensor.element_size()])
        for tensor in contiguous
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
