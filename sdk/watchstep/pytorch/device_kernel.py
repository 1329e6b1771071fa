"""Statistics of tensors on a device: the Triton kernel on CUDA, separate PyTorch operations elsewhere.

Triton is optional. If it is missing, cannot compile, or does not support the GPU, that is found out once for the
process; the reason is kept, and separate operations serve from then on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from watchstep.format.statistics import COUNT_COLUMNS, VALUE_COLUMNS, Histograms, StatisticsBatch
from watchstep.kernels.measurement import Completed, Measurement, Reordered
from watchstep.pytorch.cuda.arrival import DeviceError, Landing, Landings

if TYPE_CHECKING:
    from watchstep.pytorch.cuda.measuring import TritonKernel


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
        return Completed(to_batch(counts.cpu(), values.cpu(), bins.cpu()))
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
    finite_values = torch.where(finite, x, 0.0)
    magnitude = finite_values.abs()
    nonzero = magnitude > 0
    nan = torch.isnan(x).sum()
    positive = torch.isposinf(x).sum()
    total = torch.full_like(size, x.numel())
    counts = torch.stack(
        [
            total,
            nan,
            positive,
            total - size - nan - positive,
            (finite & ~nonzero).sum(),
            (finite_values < 0).sum(),
        ]
    )
    infinity = torch.full((1,), torch.inf, dtype=wide, device=x.device)
    none = torch.full((), torch.nan, dtype=wide, device=x.device)

    def smallest(chosen: Tensor, of: Tensor) -> Tensor:
        lowest = torch.cat([torch.where(chosen, of, torch.inf), infinity]).amin()
        return torch.where(chosen.any(), lowest, none)

    mean = finite_values.sum() / size
    from_mean = torch.where(finite, finite_values - mean, 0.0)
    values = torch.stack(
        [
            smallest(finite, x),
            -smallest(finite, -x),
            smallest(nonzero, magnitude),
            mean,
            (from_mean * from_mean).sum(),
            magnitude.sum(),
            (finite_values * finite_values).sum(),
        ]
    )
    powers = torch.frexp(finite_values).exponent.long() - 1 - _LOWEST_EXPONENT
    place = torch.where(nonzero, 2 * powers + (finite_values < 0), 0)
    bins = torch.zeros(_BINS, dtype=torch.int64, device=x.device)
    bins.scatter_add_(0, place, nonzero.long())
    return counts, values, bins


_log = logging.getLogger("watchstep")


@dataclass
class _Triton:
    """The kernel, or why there is none."""

    kernel: TritonKernel | None
    types: frozenset[torch.dtype]
    reason: str = ""

    def takes(self, tensor: Tensor) -> bool:
        """Whether it lies in plain memory, in a type that the kernel reads."""
        return tensor.dtype in self.types and type(tensor) is Tensor

    def give_up(self, error: Exception) -> None:
        """From now on, separate operations."""
        self.kernel = None
        self.reason = (
            f"Triton failed, tensors on GPUs are measured by separate operations: {_first_line(error)}"
        )
        _log.warning("watchstep: %s", self.reason)


@functools.cache
def _triton() -> _Triton:
    try:
        from watchstep.pytorch.cuda.measuring import TYPES, TritonKernel
    except ImportError as error:
        return _Triton(
            None,
            frozenset(),
            f"no Triton, tensors on GPUs are measured by separate operations: {_first_line(error)}",
        )
    return _Triton(TritonKernel(), frozenset(TYPES))


def reason() -> str:
    """Why the Triton kernel does not serve, for health; empty where it does, or was not asked for yet."""
    return _triton().reason if _triton.cache_info().currsize else ""


def capturing() -> bool:
    """Whether the current stream captures a CUDA graph: then nothing may be measured, and nothing asked of CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def measure(tensors: Sequence[Tensor]) -> Measurement:
    """Start to measure.

    Args:
        tensors: on one device that is not the host, dense in any order; one or more.

    Raises:
        DeviceError: a CUDA graph is being captured.
        torch.cuda.OutOfMemoryError: the device has no room for the results.
    """
    if tensors[0].device.type != "cuda":
        return measure_by_operations(tensors)
    if capturing():
        raise DeviceError(
            "measuring while a CUDA graph is captured", "nothing: steps that run eagerly are measured"
        )
    triton = _triton()
    fast = [place for place, tensor in enumerate(tensors) if triton.takes(tensor)]
    if triton.kernel is None or not fast:
        return measure_by_operations(tensors)
    try:
        measured = triton.kernel.measure([tensors[place] for place in fast])
    except torch.cuda.OutOfMemoryError:
        raise  # separate operations would take more
    except Exception as error:  # noqa: BLE001 - a compiler's errors are of any kind, and training goes on
        triton.give_up(error)
        return measure_by_operations(tensors)
    if len(fast) == len(tensors):
        return measured
    others = sorted(set(range(len(tensors))) - set(fast))
    with torch.cuda.device(tensors[0].device):
        return Reordered.of([(fast, measured), (others, measure_by_operations([tensors[p] for p in others]))])


@dataclass(frozen=True)
class NonfiniteLook:
    """A look for NaN and infinity that a device is at."""

    _landing: Landing
    _give_back: Callable[[Landing], Any]

    def answer(self) -> bool | None:
        """Whether something was found; None while that is not known. Once it is known, the look is over."""
        if not self._landing.arrived:
            return None
        nonfinite = bool(self._landing.results[0])
        self._give_back(self._landing)
        return nonfinite


def look(tensors: Sequence[Tensor]) -> NonfiniteLook:
    """Start to look for NaN and infinity, without a wait.

    Args:
        tensors: as above, on CUDA, and no graph is being captured. By Triton of large ones an eighth, else whole.
    """
    triton = _triton()
    if triton.kernel is not None and all(map(triton.takes, tensors)):
        try:
            return NonfiniteLook(triton.kernel.look(tensors), triton.kernel.looked)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            triton.give_up(error)
    with torch.cuda.device(tensors[0].device):
        landing = _landings.take(1, pinned=True)
        landing.fill(nonfinite_by_operations(tensors))
    return NonfiniteLook(landing, _landings.give_back)


def nonfinite_by_operations(tensors: Sequence[Tensor]) -> Tensor:
    """Two int64 on the device: whether something is NaN or infinite, and a one.

    The largest magnitude of each tensor says so, NaN included, in one number of memory a tensor. fp8, which has no such
    operation, is widened.
    """
    wide = [tensor if tensor.dtype in _NORMED else tensor.float() for tensor in tensors if tensor.numel()]
    largest = [norm.double() for norm in torch._foreach_norm(wide, torch.inf)] if wide else []  # noqa: SLF001 - has no public name
    zero = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    bad = ~torch.isfinite(torch.stack([zero, *largest])).all()
    return torch.stack([bad, torch.ones_like(bad)]).long()


_NORMED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
