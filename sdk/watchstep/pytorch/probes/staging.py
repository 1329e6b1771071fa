"""Tools of probes: asynchronous copies of small tensors from a device, and samples of large tensors.

Samples use the same elements each time, so that two moments can be compared without a second model: all elements of a small
tensor, evenly spaced elements of a large one. A mean square over n of them estimates that of the whole tensor with a relative
standard error of about sqrt(2 / n) for normal elements: 1.1 percent at 16,384.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from watchstep.format.statistics import Floats
from watchstep.pytorch import internals


def stacked(figures: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape that may be on several devices, like the layers of a model.

    The result is on the first device that is not the host, because an asynchronous copy to the host has no values yet.
    """
    device = next((figure.device for figure in figures if not figure.is_cpu), figures[0].device)
    if device.type == "cpu" and not figures[0].dim():  # many numbers are read faster than stacked
        return torch.tensor([figure.item() for figure in figures], dtype=figures[0].dtype)
    return torch.stack([figure.to(device, non_blocking=True) for figure in figures])


class HostCopy:
    """Copies a tensor to the host asynchronously. `numbers` waits for the copy, and is called outside the training thread."""

    def __init__(self, figures: Tensor) -> None:
        self._event: Any = None
        self._copied = figures.detach().to("cpu", non_blocking=True)
        if figures.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(figures.device))

    @property
    def is_complete(self) -> bool:
        """Whether the copy is complete, so that `numbers` does not wait."""
        return self._event is None or bool(self._event.query())

    def numbers(self) -> Floats:
        """Wait for the copy, and return it as float64 in the tensor's shape."""
        if self._event is not None:
            self._event.synchronize()
        return np.asarray(self._copied.double().numpy())


PLAIN_TYPES = {Tensor, torch.nn.Parameter}


def has_all_memory(tensor: Tensor) -> bool:
    """Return whether all elements of a tensor lie in its storage. A copy of a tensor whose storage was freed ends the process."""
    if type(tensor) not in PLAIN_TYPES and internals.is_wrapper(tensor):
        return True  # its values are in inner tensors
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta:
        return True
    if tensor.is_contiguous():
        extent = tensor.numel()
    else:
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + extent) * tensor.element_size()


@dataclass(frozen=True)
class ElementSamples:
    """Copies of one-dimensional tensors in float32. Those of one device share memory, so that one operation handles all of them.

    Attributes:
        lengths: Number of elements of each.
        parts: For each device, the places of its tensors, and their elements one after another.
    """

    lengths: list[int]
    parts: list[tuple[list[int], Tensor]]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> ElementSamples:
        """Copy tensors of shape (n,) each, with any n and dtype.

        Raises:
            ValueError: The program has freed the storage of a tensor.
        """
        if not all(map(has_all_memory, tensors)):
            raise ValueError("the storage of a tensor was freed, so that it has no values to copy")
        by_device: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(place)
        parts = [
            (places, torch.cat([tensors[place].to(torch.float32) for place in places]))
            for places in by_device.values()
        ]
        return cls([len(tensor) for tensor in tensors], parts)

    def minus(self, others: ElementSamples) -> ElementSamples:
        """Return the differences to earlier copies of the same tensors.

        Raises:
            ValueError: The tensors have other lengths or devices.
        """
        if self.lengths != others.lengths or [places for places, _ in self.parts] != [
            places for places, _ in others.parts
        ]:
            raise ValueError("tensors changed their sizes or devices between two samples")
        differences = [
            (places, new - old) for (places, new), (_, old) in zip(self.parts, others.parts, strict=True)
        ]
        return ElementSamples(self.lengths, differences)

    def each(self) -> list[Tensor]:
        """Return the copy of each tensor."""
        tensors = [
            (place, tensor)
            for places, elements in self.parts
            for place, tensor in zip(
                places, elements.split([self.lengths[place] for place in places]), strict=True
            )
        ]
        if len(self.parts) > 1:
            tensors.sort(key=lambda entry: entry[0])
        return [tensor for _, tensor in tensors]


MOST = 16_384
LEAST = 256
ALTOGETHER = 4 * 1024 * 1024


def elements_of_each(tensors: int) -> int:
    """Return the sample size of each of a number of tensors: at most 16,384, and about 4 Mi in total."""
    return max(LEAST, min(MOST, ALTOGETHER // max(1, tensors)))


def wide_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@torch.no_grad()
def views(tensors: Sequence[Tensor], most: int) -> list[Tensor]:
    """Return evenly spaced elements of each tensor, as views if the tensor is dense.

    Args:
        tensors: Strided tensors. The local part of a `DTensor` is used, and real and imaginary parts of complex tensors.
        most: Maximum number of elements of each.
    """
    return [_spaced(_flat(tensor), tensor, most) for tensor in tensors]


def _flat(tensor: Tensor) -> Tensor:
    """Return all elements in memory order if the tensor is dense, else in the tensor's order."""
    if type(tensor) in PLAIN_TYPES and tensor.is_contiguous() and not tensor.is_complex():
        return tensor.view(-1)
    elements = tensor.detach()
    if hasattr(elements, "to_local"):
        elements = elements.to_local()
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj())
    strides = elements.stride()
    by_stride = sorted(range(elements.dim()), key=lambda place: -strides[place])
    return elements.permute(by_stride).reshape(-1)


def _spaced(flat: Tensor, tensor: Tensor, most: int) -> Tensor:
    if flat.numel() <= most:
        return flat
    stride = -(-flat.numel() // most)
    width = tensor.shape[-1] if tensor.dim() else 1
    width *= 2 if tensor.is_complex() else 1
    while math.gcd(stride, max(1, width)) > 1:  # else only some columns would be sampled
        stride += 1
    return flat[::stride]
