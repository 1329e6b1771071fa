"""Statistics of PyTorch tensors: host memory by the compiled kernel or numpy, devices by torch operations.

On a device everything is computed there, in one small result per tensor, and copied without synchronising the
stream; `collect` waits for the copy, on the writer's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from watchstep.histogram import Histograms
from watchstep.kernels import native_kernel
from watchstep.kernels.array_kernel import measure_array
from watchstep.kernels.interface import Measurement
from watchstep.kernels.native_kernel import KINDS, Memory
from watchstep.kernels.ready import Ready
from watchstep.statistics import StatisticsBatch

_BINS = 4096
_LOWEST_EXPONENT = -1074


class TorchKernel:
    """Measures dense and sparse tensors of every real dtype; complex ones as their real and imaginary parts."""

    @torch.no_grad()
    def measure(self, tensors: Sequence[Tensor]) -> Measurement:
        """Start to measure.

        Args:
            tensors: all on the host, or all on devices.
        """
        plain = [_plain(tensor) for tensor in tensors]
        if any(tensor.device.type != "cpu" for tensor in plain):
            return _OnDevice.start(plain)
        native = native_kernel.load()
        if native is not None and all(tensor.dtype in _NATIVE for tensor in plain):
            dense = [_dense(tensor) for tensor in plain]
            return Ready(native.measure([_memory(tensor) for tensor in dense]))
        return Ready(StatisticsBatch.concatenate([measure_array(_as_array(tensor)) for tensor in plain]))


def native_memory(tensors: Sequence[Tensor]) -> list[Memory] | None:
    """Where tensors lie that the compiled kernel can take as they are; None where one of them is of another sort."""
    if not all(
        tensor.dtype in _NATIVE and tensor.device.type == "cpu" and _is_dense(tensor) for tensor in tensors
    ):
        return None
    return [_memory(tensor) for tensor in tensors]


def _memory(tensor: Tensor) -> Memory:
    return Memory(tensor.data_ptr(), tensor.numel(), _NATIVE[tensor.dtype])


_NATIVE = {getattr(torch, name): kind for name, kind in KINDS.items()}


def _dense(tensor: Tensor) -> Tensor:
    """The tensor where its elements lie one behind the other in any order, else a copy that does."""
    return tensor if _is_dense(tensor) else tensor.contiguous()


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
    """The values that this process holds, as a dense real tensor that shares memory where it can."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
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


@dataclass
class _OnDevice:
    """Counts, values and histograms on their way to the host."""

    counts: Tensor
    values: Tensor
    bins: Tensor
    event: Any

    nonfinite: bool | None = None

    @classmethod
    def start(cls, tensors: list[Tensor]) -> _OnDevice:
        parts = [measure_on_device(tensor) for tensor in tensors]
        counts, values, bins = (
            torch.stack(column).to("cpu", non_blocking=True) for column in zip(*parts, strict=True)
        )
        event = None
        if tensors[0].device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return cls(counts, values, bins, event)

    def collect(self) -> StatisticsBatch:
        if self.event is not None:
            self.event.synchronize()
        return to_batch(self.counts, self.values, self.bins)


def to_batch(counts: Tensor, values: Tensor, bins: Tensor) -> StatisticsBatch:
    """Statistics from what `measure_on_device` gave, stacked: shapes (n, 6), (n, 7) and (n, 4096)."""
    dense = bins.numpy()
    rows, places = np.nonzero(dense)
    offsets = np.searchsorted(rows, np.arange(len(dense) + 1)).astype(np.int64)
    histogram = Histograms(offsets, (places + 2 * _LOWEST_EXPONENT).astype(np.int16), dense[rows, places])
    return StatisticsBatch.from_matrices(counts.numpy(), values.double().numpy(), histogram)


def measure_on_device(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Counts (6, int64), values (7, float64 where the device has it) and a dense histogram (4096, int64)."""
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    x = tensor.reshape(-1).to(wide)
    finite = torch.isfinite(x)
    size = finite.sum()
    kept = torch.where(finite, x, 0.0)
    magnitude = kept.abs()
    nonzero = magnitude > 0
    nan = torch.isnan(x).sum()
    positive = torch.isposinf(x).sum()
    total = torch.full_like(size, x.numel())
    counts = torch.stack(
        [total, nan, positive, total - size - nan - positive, (finite & ~nonzero).sum(), (kept < 0).sum()]
    )
    infinity = torch.full((1,), torch.inf, dtype=wide, device=x.device)
    none = torch.full((), torch.nan, dtype=wide, device=x.device)

    def smallest(chosen: Tensor, of: Tensor) -> Tensor:
        lowest = torch.cat([torch.where(chosen, of, torch.inf), infinity]).amin()
        return torch.where(chosen.any(), lowest, none)

    mean = kept.sum() / size
    from_mean = torch.where(finite, kept - mean, 0.0)
    values = torch.stack(
        [
            smallest(finite, x),
            -smallest(finite, -x),
            smallest(nonzero, magnitude),
            mean,
            (from_mean * from_mean).sum(),
            magnitude.sum(),
            (kept * kept).sum(),
        ]
    )
    powers = torch.frexp(kept).exponent.long() - 1 - _LOWEST_EXPONENT
    place = torch.where(nonzero, 2 * powers + (kept < 0), 0)
    bins = torch.zeros(_BINS, dtype=torch.int64, device=x.device)
    bins.scatter_add_(0, place, nonzero.long())
    return counts, values, bins
