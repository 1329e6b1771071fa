"""Statistics and checksums of PyTorch tensors on any device.

Tensors in host memory are measured by the compiled kernel or numpy, others on their device. Results of a device are copied
without synchronizing the stream; `collect` waits for the copy, on the writer's thread.

A checksum is one number, exact in float64. `watchstep.kernels.array_kernel` defines it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from watchstep.format.statistics import StatisticsBatch, scalars
from watchstep.kernels import native_kernel
from watchstep.kernels.array_kernel import (
    BLOCK,
    DROPPED,
    MAX_OVERLAPPING_BYTES,
    MULTIPLIERS,
    SHIFTS,
    STEP,
    checksum_array,
    measure_array,
)
from watchstep.kernels.measurement import Completed, Measurement, Reordered, Repeated
from watchstep.kernels.native_kernel import KIND_OF_WIDTH, KINDS, MemoryRange, MemoryRanges
from watchstep.pytorch import device_kernel, internals
from watchstep.pytorch.device_kernel import measure_by_operations
from watchstep.pytorch.probes.staging import PLAIN_TYPES, HostCopy


class TorchKernel:
    """Measures dense and sparse tensors of every dtype. A complex tensor is measured as its real and imaginary parts."""

    def measure(self, tensors: Sequence[Tensor]) -> Measurement:
        """Start a measurement.

        Args:
            tensors: Tensors on one or several devices.

        Raises:
            DeviceError: A CUDA graph is being captured on the current stream.
        """
        native = native_kernel.load()
        memory = None if native is None else native_ranges(tensors, _memory_of_part)
        # Tensors of zeros without memory, and lazy negations, are known by their address and by a bit.
        if native and memory and all(memory.addresses) and not any(map(Tensor.is_neg, tensors)):
            return native.measure_ranges(memory)
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
    """Measure tensors of one device."""
    if plain and plain[0].device.type != "cpu":
        return device_kernel.measure([_dense(tensor) for tensor in plain])
    if any(
        type(tensor) is not Tensor for tensor in plain
    ):  # wrapper subclasses store their values in inner tensors
        return measure_by_operations(plain)
    native = native_kernel.load()
    if native is not None and all(tensor.dtype in _NATIVE for tensor in plain):
        dense = [_dense(tensor) for tensor in plain]
        return native.measure([_memory(tensor) for tensor in dense])
    return Completed(StatisticsBatch.concatenate([measure_array(_as_array(tensor)) for tensor in plain]))


def measure_figures(tensors: Sequence[Tensor]) -> Measurement | None:
    """Measure tensors in host memory without histograms; None if there are none, or the compiled kernel is missing or cannot read one of them."""
    native = native_kernel.load() if tensors else None
    memory = None if native is None else native_ranges(tensors, _memory_of_part)
    if native is None or memory is None or not all(memory.addresses) or any(map(Tensor.is_neg, tensors)):
        return None
    return native.measure_ranges(memory, histogram=False)


def device_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the values in this process as dense tensors in any element order, as a device's kernel requires."""
    return [_dense(_plain(tensor)) for tensor in tensors]


def distinct_elements(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `device_tensors` without repeated elements, which is sufficient to find non-finite ones."""
    return [_dense(_collapsed(_plain(tensor))[0]) for tensor in tensors]


def native_memory(tensors: Sequence[Tensor]) -> list[MemoryRange] | None:
    """Return the memory of each tensor that the compiled kernel can read without conversion; None if it cannot read one of them."""
    ranges = native_ranges(tensors)
    return None if ranges is None else [MemoryRange(*memory) for memory in zip(*ranges, strict=True)]


def native_ranges(
    tensors: Sequence[Tensor], unusual: Callable[[Tensor], MemoryRange | None] | None = None
) -> MemoryRanges | None:
    """Return the same as `native_memory` by column.

    Called for every gradient at every step: with thousands of gradients, each microsecond counts.

    Args:
        tensors: The tensors.
        unusual: Returns the memory of a tensor that is not contiguous from the start of its storage, or None if the kernel cannot read it.
            By default it is that of the values that the tensor refers to, which is sufficient to find non-finite ones.
    """
    unusual = unusual or _memory_of_unusual
    addresses, sizes, kinds = [], [], []
    for tensor in tensors:
        if (
            type(tensor) in PLAIN_TYPES
            and (kind := _NATIVE.get(tensor.dtype)) is not None
            and tensor.is_cpu
            and tensor.layout is _STRIDED
            and tensor.is_contiguous()
            and not tensor.storage_offset()  # else an address does not show whether there is memory
        ):
            address, elements = tensor.data_ptr(), tensor.numel()
        else:
            memory = unusual(tensor)
            if memory is None:
                return None
            address, elements, kind = memory
        addresses.append(address)
        # Programs free the storage of a tensor, and forward-mode differentiation has tensors of zeros without memory.
        sizes.append(elements if address else 0)
        kinds.append(kind)
    return MemoryRanges(addresses, sizes, kinds)


def _memory_of_part(tensor: Tensor) -> MemoryRange | None:
    """Return the memory of a contiguous tensor that is a part of a larger one; None for any other."""
    if type(tensor) in PLAIN_TYPES and tensor.is_cpu and tensor.layout is _STRIDED and tensor.is_contiguous():
        kind = _NATIVE.get(tensor.dtype)
        if kind is not None and tensor.untyped_storage().nbytes() > 0:
            return MemoryRange(tensor.data_ptr(), tensor.numel(), kind)
    return None


def _memory_of_unusual(tensor: Tensor) -> MemoryRange | None:
    local = tensor if type(tensor) in PLAIN_TYPES else _plain(tensor)
    kind = _NATIVE.get(local.dtype)
    if kind is None or not local.is_cpu:
        return None
    if type(local) in PLAIN_TYPES and not _has_memory(local):
        return MemoryRange(0, 0, kind)
    if not _is_dense(local):
        return None
    return MemoryRange(local.data_ptr(), local.numel(), kind)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all elements are finite, by PyTorch operations. For tensors in host memory that the compiled kernel cannot read."""
    return all(bool(torch.isfinite(_comparable(_collapsed(_plain(tensor))[0])).all()) for tensor in tensors)


def _comparable(tensor: Tensor) -> Tensor:
    """Return the tensor in a dtype that ``torch.isfinite`` supports; it does not support fp8."""
    return tensor.float() if tensor.element_size() == 1 else tensor


def _memory(tensor: Tensor) -> MemoryRange:
    return MemoryRange(tensor.data_ptr(), tensor.numel(), _NATIVE[tensor.dtype])


_NATIVE = {getattr(torch, name): kind for name, kind in KINDS.items()}


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor if its elements are contiguous in any order, else a contiguous copy."""
    return tensor if _is_dense(tensor) else tensor.contiguous()


def _collapsed(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a tensor without the dimensions along which it repeats its elements, and the number of repetitions.

    A copy of an expanded tensor of a few bytes may take gigabytes.
    """
    if type(tensor) is not Tensor or tensor.is_contiguous():
        return tensor, 1
    if 0 not in tensor.stride():
        return _distinct_memory(tensor), 1
    factor = 1
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
            factor *= size
    return tensor, factor


def _distinct_memory(tensor: Tensor) -> Tensor:
    """Return a large tensor with elements that overlap, as those of ``unfold``, as the memory that it shows; any other tensor unchanged.

    A copy of overlapping windows of a few megabytes may take gigabytes.
    """
    elements = tensor.numel()
    if elements * tensor.element_size() <= MAX_OVERLAPPING_BYTES:
        return tensor
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,)) if elements > 2 * extent else tensor


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has storage: programs free the storage of a tensor that they will recompute, and keep its shape."""
    return tensor.layout is not torch.strided or not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def _is_dense(tensor: Tensor) -> bool:
    if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    if tensor.dim() == _IMAGE_DIMENSIONS:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() > 1 and tensor.transpose(-1, -2).is_contiguous()


_IMAGE_DIMENSIONS = 4
_STRIDED = torch.strided


def _plain(tensor: Tensor) -> Tensor:
    """Return the values in this process as a dense real tensor, which shares memory if possible; empty if they were freed."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if type(tensor) is not Tensor and not internals.is_wrapper(tensor):
        tensor = tensor.as_subclass(Tensor)
    if type(tensor) is Tensor and not _has_memory(tensor):
        return tensor.new_empty(0)
    if internals.is_zero_tensor(tensor):
        # Forward-mode differentiation has tensors of zeros without memory.
        tensor = tensor.new_zeros(()).expand(tensor.shape)
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
    else:
        # The program can no longer free the storage of a tensor that shares it with an array.
        tensor = tensor.clone()
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


_SLICE = 1024 * BLOCK
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Word dtype by element size in bytes."""

_WORD_MASKS = {torch.uint8: 0xFF, torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF}


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Compute checksums of the values in this process.

    The checksum of a sparse tensor covers its values only, not their indices. Quantized tensors are dequantized.

    Args:
        tensors: Tensors of one device or the host, with any dtype, shape and strides.

    Returns:
        int64 of shape (n,) on that device. This does not wait for the device.

    Raises:
        ValueError: The tensors are on several devices.
    """
    plain = [_plain(tensor) for tensor in tensors]
    devices = {tensor.device for tensor in plain}
    if len(devices) > 1:
        device_names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"checksums of tensors on {device_names}: give those of one device at a time")
    if devices - {torch.device("cpu")}:
        return torch.stack([checksum_on_device(tensor) for tensor in plain])
    contiguous = [tensor.contiguous() for tensor in plain]
    native = native_kernel.load()
    if native is None:
        sums = [checksum_array(_words(tensor).clone().numpy()) for tensor in contiguous]
        return torch.tensor(sums, dtype=torch.int64)
    memories = [
        MemoryRange(tensor.data_ptr(), tensor.numel(), KIND_OF_WIDTH[tensor.element_size()])
        for tensor in contiguous
    ]
    return torch.from_numpy(native.checksums(memories))


@torch.no_grad()
def checksum_on_device(tensor: Tensor) -> Tensor:
    """Compute the checksum by operations on the tensor's device, without waiting for them.

    This takes about 32 MB in addition to the tensor, and a copy of the tensor if it is not contiguous.

    Args:
        tensor: A dense real tensor of any dtype and shape.

    Returns:
        int64 of shape ().
    """
    words, device = _words(tensor.detach().contiguous()), tensor.device
    keys = _mixed(torch.arange(1, BLOCK + 1, device=device) * _signed(STEP)) | 1
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(words), _SLICE):
        part = words[start : start + _SLICE].long().bitwise_and_(_WORD_MASKS[words.dtype])
        part = functional.pad(part ^ (part >> 16), (0, -len(part) % BLOCK)).view(-1, BLOCK)
        first = start // BLOCK
        order = torch.arange(first + 1, first + 1 + len(part), device=device) * _signed(STEP)
        total += _mixed(part.mul_(keys).sum(1) + order).sum()
    return _shifted(_mixed(total + _signed(len(words) * STEP)), DROPPED)


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):  # a tensor of zero or one element counts as contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(_WORDS[tensor.element_size()])


def _mixed(x: Tensor) -> Tensor:
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = (x ^ _shifted(x, shift)) * _signed(multiplier)
    return x ^ _shifted(x, SHIFTS[-1])


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; int64 would shift in its sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass(frozen=True)
class Checksums:
    """A measurement of checksums."""

    figures: HostCopy
    nonfinite: bool | None = False

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Checksums:
        """Start to compute the checksum of this worker's part of each tensor."""
        return cls(HostCopy(checksums(tensors)))

    def collect(self) -> StatisticsBatch:
        """Wait for the device, and return one row per tensor."""
        return scalars(self.figures.numbers().tolist())
