"""Counts, statistics and values of single tensors for a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from watchstep.kernels.native_kernel import MemoryRange
from watchstep.pytorch.kernel import TorchKernel, checksums, native_memory
from watchstep.pytorch.observable import dense_values
from watchstep.trace.operations import TensorHealth

_kernel = TorchKernel()


def is_checkable(tensor: Tensor) -> bool:
    """Return whether a tensor has values that can be NaN or infinite."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta and tensor.numel() > 0


def health_of(tensor: Tensor, *, counts: bool = True, statistics: bool = False) -> TensorHealth | None:
    """Count a tensor's elements. Waits for a device.

    Args:
        tensor: Any tensor. A complex one counts as its real and imaginary parts.
        counts: Whether negative, zero and positive elements are returned.
        statistics: Whether statistics of the finite elements are returned.

    Returns:
        The counts; None for a tensor without values.
    """
    values = dense_values(tensor.detach())
    if values is None or not is_checkable(values):
        return None
    row = _kernel.measure([values]).collect()
    nan, positive, negative, elements = (
        int(column[0]) for column in (row.nan, row.pos_inf, row.neg_inf, row.count)
    )
    finite = elements - nan - positive - negative
    below, zero = int(row.negative[0]), int(row.zero[0])
    first, rows = ((), None) if finite == elements else _bad_places(values)
    health = TensorHealth(elements, nan, positive, negative, first_bad=first, bad_rows=rows)
    if counts:
        health = replace(health, negative=below, zero=zero, positive=finite - zero - below)
    if statistics and finite:
        health = replace(
            health,
            minimum=float(row.min[0]),
            maximum=float(row.max[0]),
            mean=float(row.mean[0]),
            std=math.sqrt(float(row.m2[0]) / finite),
            norm=math.sqrt(float(row.square_sum[0])),
            smallest=float(row.abs_min[0]) if finite > zero else None,
        )
    return health


def host_memory(tensor: Tensor) -> MemoryRange | None:
    """Return the memory of a tensor on the host that the compiled kernel can read; None if there are gaps between its elements."""
    ranges = native_memory([tensor])
    if ranges is not None:
        return ranges[0]
    # Attention has outputs whose dimensions are in another order.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    permuted = tensor.permute(order) if tensor.layout is torch.strided and type(tensor) is Tensor else None
    ranges = native_memory([permuted]) if permuted is not None and permuted.is_contiguous() else None
    return ranges[0] if ranges is not None else None


def extremes(tensor: Tensor) -> Tensor:
    """Return the smallest and largest element, of shape (2,); NaN or infinite if any element is. Does not wait for a device."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if values.element_size() == 1:  # operations do not support fp8
        values = values.float()
    return torch.stack(torch.aminmax(values)).double()


def health_of_extremes(elements: int, smallest: float, largest: float) -> TensorHealth:
    """Return what the result of `extremes` says about a tensor.

    Args:
        elements: Number of elements.
        smallest: The smallest element.
        largest: The largest element.
    """
    if math.isnan(smallest) or math.isnan(largest):
        return TensorHealth(elements, nan=1, is_exact=False)
    return TensorHealth(
        elements,
        positive_infinite=int(largest == math.inf),
        negative_infinite=int(smallest == -math.inf),
        is_exact=not math.isinf(smallest) and not math.isinf(largest),
    )


def checksums_of(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return a checksum of the bits of each tensor; None for those without values. Waits for devices."""
    results: list[int | None] = [None] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if not tensor.is_meta and tensor.layout is torch.strided:
            by_device.setdefault(tensor.device, []).append(place)
    for places in by_device.values():
        try:
            found = checksums([tensors[place].detach() for place in places]).tolist()
        except (RuntimeError, TypeError, ValueError, KeyError, NotImplementedError):
            continue  # dtypes and classes of tensors without readable memory
        for place, number in zip(places, found, strict=True):
            results[place] = int(number)
    return results


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the elements are in host memory, so that they can be read at once."""
    return tensor.is_cpu


def values_of(tensor: Tensor) -> NDArray[Any] | None:
    """Return a copy of a tensor's elements in host memory; None for a tensor without values. Waits for a device."""
    values = dense_values(tensor.detach())
    if values is None or values.layout is not torch.strided:
        return None
    host = values.cpu()
    if host.is_floating_point() and host.dtype not in {torch.float16, torch.float32, torch.float64}:
        host = host.float()
    return np.array(host.resolve_conj().resolve_neg().numpy())


def _bad_places(values: Tensor) -> tuple[tuple[int, ...], int | None]:
    """Return the index of the first element that is not finite, and the number of places along the first dimension with one."""
    if values.layout is not torch.strided or values.is_quantized:
        return (), None
    is_bad = ~torch.isfinite(values.float() if values.element_size() == 1 else values)
    if not is_bad.numel():
        return (), None
    position = int(is_bad.reshape(-1).to(torch.uint8).argmax())
    rows = int(is_bad.reshape(len(values), -1).any(1).sum()) if values.dim() else 1
    return tuple(int(index) for index in np.unravel_index(position, tuple(values.shape))), rows
