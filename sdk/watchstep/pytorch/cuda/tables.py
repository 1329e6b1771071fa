"""The table that a launch reads: where each tensor lies, and which program does which part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from watchstep.kernels.native_kernel import KINDS
from watchstep.pytorch.cuda.programs import REGION, SPAN

Purpose = Literal["measure", "look"]
Region = tuple[int, int, int]

TYPES = {getattr(torch, name): kind for name, kind in KINDS.items() if name != "float64"}
"""Element types that the kernels read, by their number; float64 goes by separate operations."""

SLICES = 8
_SLICED = 1 << 18
"""Tensors of at least so many elements are looked at by slices."""
_ALIGNED = 16
_HELD = 32


@dataclass(frozen=True)
class Table:
    """A table on its device.

    Attributes:
        numbers: int64, `REGION` for each tensor, then the tensor of each program.
        regions: how many tensors there are.
        programs: how many programs the launch takes.
        elements: int64, shape (regions,), of each tensor; on the host.
    """

    numbers: Tensor
    regions: int
    programs: int
    elements: NDArray[np.int64]


class Tables:
    """Makes tables, and keeps the last ones: parameters stay where they are, and gradients mostly return there."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[object, ...], Table] = OrderedDict()

    def of(self, tensors: Sequence[Tensor], purpose: Purpose) -> Table:
        """The table of tensors on one device.

        Args:
            tensors: dense, of `TYPES`.
            purpose: to measure each element, or to look at large tensors by slices.
        """
        regions = tuple((tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype]) for tensor in tensors)
        device = tensors[0].device
        # A copy is in order on the stream that it was made on: another stream needs its own.
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (device, stream, purpose, regions)
        table = self._held.get(key)
        if table is None:
            table = self._held[key] = _make(regions, device, purpose)
            if len(self._held) > _HELD:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        return table


def _make(regions: tuple[Region, ...], device: torch.device, purpose: Purpose) -> Table:
    address, elements, kind = np.array(regions, np.int64).reshape(-1, 3).T
    size = np.array([dtype.itemsize for dtype in TYPES], np.int64)[
        np.searchsorted(list(TYPES.values()), kind)
    ]
    # Programs read 16 bytes a thread from aligned addresses, and mask what lies before the tensor.
    start = address % _ALIGNED // size
    end = np.where(elements > 0, start + elements, 0)
    spans = -(-end // SPAN)
    if purpose == "look":
        large = elements >= _SLICED
        spans = np.where(large, -(-spans // SLICES), spans)
        kind = np.where(large, -1 - kind, kind)
    first = np.concatenate([[0], np.cumsum(spans)])
    numbers = np.empty(len(regions) * REGION + first[-1], np.int64)
    numbers[: len(regions) * REGION] = np.stack(
        [address - address % _ALIGNED, start, end, kind, first[:-1]], axis=1
    ).ravel()
    numbers[len(regions) * REGION :] = np.repeat(np.arange(len(regions)), spans)
    return Table(_moved(numbers, device), len(regions), int(first[-1]), elements)


def _moved(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """On the device, by a copy that nothing waits for: from pinned memory, which PyTorch keeps until it is done."""
    here = torch.from_numpy(numbers)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
