"""Statistics of tensors on any device by PyTorch's own operations: where there is no kernel, or none for the type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from watchstep.histogram import Histograms
from watchstep.kernels.interface import Measurement
from watchstep.kernels.ready import Ready
from watchstep.pytorch.cuda.arrival import Landing, Landings
from watchstep.statistics import COUNT_COLUMNS, VALUE_COLUMNS, StatisticsBatch

_BINS = 4096
_LOWEST_EXPONENT = -1074
_COUNTS, _VALUES = len(COUNT_COLUMNS), len(VALUE_COLUMNS)
_ROW = _COUNTS + _VALUES + _BINS
_landings = Landings()


def measure_by_operations(tensors: Sequence[Tensor]) -> Measurement:
    """Start to measure; on CUDA without a wait.

    Args:
        tensors: on one device, one or more.
    """
    counts, values, bins = (
        torch.stack(column) for column in zip(*map(measure_on_device, tensors), strict=True)
    )
    if counts.device.type != "cuda":
        return Ready(to_batch(counts.cpu(), values.cpu(), bins.cpu()))
    numbers = torch.cat([counts, values.view(torch.int64), bins], dim=1).flatten()
    landing = _landings.take(len(numbers), pinned=True)
    landing.fill(torch.cat([numbers, torch.ones_like(numbers[:1])]))
    return _OnItsWay(landing, len(tensors))


@dataclass
class _OnItsWay:
    """Counts, values and histograms on their way to the host."""

    _landing: Landing
    _tensors: int

    nonfinite: bool | None = None

    def collect(self) -> StatisticsBatch:
        self._landing.wait()
        rows = self._landing.results[: self._tensors * _ROW].view(self._tensors, _ROW)
        counts, values, bins = rows.clone().split([_COUNTS, _VALUES, _BINS], dim=1)
        _landings.give_back(self._landing)
        return to_batch(counts, values.contiguous().view(torch.float64), bins)


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
