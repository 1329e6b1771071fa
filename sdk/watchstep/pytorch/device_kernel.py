"""Statistics of tensors on a device: the Triton kernel on CUDA, separate PyTorch operations on other devices.

Triton is optional. Whether it is missing, cannot compile, or does not support the GPU is determined once per
process. The reason is kept, and separate operations are used from then on.
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
from watchstep.platform.program_errors import is_of_program
from watchstep.pytorch import internals
from watchstep.pytorch.cuda.arrival import DeviceError, Landing, Landings

if TYPE_CHECKING:
    from watchstep.pytorch.cuda.measuring import TritonKernel


_BINS = 4096
_LOWEST_EXPONENT = -1074
_COUNTS, _VALUES = len(COUNT_COLUMNS), len(VALUE_COLUMNS)
_ROW = _COUNTS + _VALUES + _BINS
_landings = Landings()
_HAS_CUDA = torch.backends.cuda.is_built()


def measure_by_operations(tensors: Sequence[Tensor]) -> Measurement:
    """Start a measurement; on CUDA without a wait.

    Args:
        tensors: One or more tensors on one device.
    """
    counts, values, bins = (
        torch.stack(column) for column in zip(*map(measure_on_device, tensors), strict=True)
    )
    if counts.device.type != "cuda":
        return Completed(to_batch(counts.cpu(), values.cpu(), bins.cpu()))
    numbers = torch.cat([counts, values.view(torch.int64), bins], dim=1).flatten()
    landing = _landings.take(len(numbers), pinned=True)
    landing.fill(torch.cat([numbers, torch.ones_like(numbers[:1])]))
    return _PendingMeasurement(landing, len(tensors))


@dataclass
class _PendingMeasurement:
    """Counts, values and histograms that are being copied to the host."""

    _landing: Landing
    _tensors: int

    nonfinite: bool | None = None

    def collect(self) -> StatisticsBatch:
        self._landing.wait()
        rows = self._landing.results[: self._tensors * _ROW].view(self._tensors, _ROW)
        counts, values, bins = rows.clone().split([_COUNTS, _VALUES, _BINS], dim=1)
        _landings.release(self._landing)
        return to_batch(counts, values.contiguous().view(torch.float64), bins)


def to_batch(counts: Tensor, values: Tensor, bins: Tensor) -> StatisticsBatch:
    """Return statistics from stacked results of `measure_on_device`: shapes (n, 6), (n, 7) and (n, 4096)."""
    dense = bins.numpy()
    rows, places = np.nonzero(dense)
    offsets = np.searchsorted(rows, np.arange(len(dense) + 1)).astype(np.int64)
    histogram = Histograms(offsets, (places + 2 * _LOWEST_EXPONENT).astype(np.int16), dense[rows, places])
    return StatisticsBatch.from_matrices(counts.numpy(), values.double().numpy(), histogram)


def measure_on_device(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return counts (6, int64), values (7, float64 if the device supports it) and a dense histogram (4096, int64)."""
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
    """The kernel, or the reason why it is not available."""

    kernel: TritonKernel | None
    types: frozenset[torch.dtype]
    reason: str = ""

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in plain memory and has a type that the kernel supports."""
        return tensor.dtype in self.types and type(tensor) is Tensor

    def give_up(self, error: Exception) -> None:
        """Use separate operations from now on."""
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
    """Return why the Triton kernel is not used, for health; empty if it is used, or has not been requested yet."""
    return _triton().reason if _triton.cache_info().currsize else ""


def capturing() -> bool:
    """Return whether the current stream captures a CUDA graph. Then no measurements or CUDA queries are allowed."""
    return _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def measure(tensors: Sequence[Tensor]) -> Measurement:
    """Start a measurement.

    Args:
        tensors: One or more tensors on one device other than the host, dense in any order.

    Raises:
        DeviceError: A CUDA graph is being captured.
        torch.cuda.OutOfMemoryError: The device has no memory for the results.
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
    except Exception as error:  # a compiler's errors are of any kind, and training goes on
        if is_of_program(error):
            raise
        triton.give_up(error)
        return measure_by_operations(tensors)
    if len(fast) == len(tensors):
        return measured
    others = sorted(set(range(len(tensors))) - set(fast))
    with torch.cuda.device(tensors[0].device):
        return Reordered.of([(fast, measured), (others, measure_by_operations([tensors[p] for p in others]))])


@dataclass(frozen=True)
class NonfiniteCheck:
    """A check for NaN and infinity in progress on a device."""

    _landing: Landing
    _release: Callable[[Landing], Any]

    def answer(self) -> bool | None:
        """Return whether NaN or infinity was found; None while the check is in progress."""
        if not self._landing.arrived:
            return None
        nonfinite = bool(self._landing.results[0])
        self._release(self._landing)
        return nonfinite


def check_nonfinite(tensors: Sequence[Tensor]) -> NonfiniteCheck:
    """Start a check for NaN and infinity, without a wait.

    Args:
        tensors: Tensors as for `measure`, on CUDA, while no graph is being captured. Triton checks an eighth of large ones; otherwise all elements are checked.
    """
    triton = _triton()
    if triton.kernel is not None and all(map(triton.takes, tensors)):
        try:
            return NonfiniteCheck(triton.kernel.check_nonfinite(tensors), triton.kernel.release)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # as above
            if is_of_program(error):
                raise
            triton.give_up(error)
    with torch.cuda.device(tensors[0].device):
        landing = _landings.take(1, pinned=True)
        landing.fill(nonfinite_by_operations(tensors))
    return NonfiniteCheck(landing, _landings.release)


def nonfinite_by_operations(tensors: Sequence[Tensor]) -> Tensor:
    """Return two int64 on the device: whether any element is NaN or infinite, and 1.

    The largest magnitude of each tensor, including NaN, shows this with one number of memory per tensor. fp8, which has no such
    operation, is widened.
    """
    wide = [tensor if tensor.dtype in _NORMED else tensor.float() for tensor in tensors if tensor.numel()]
    largest = [norm.double() for norm in internals.largest_magnitudes(wide)] if wide else []
    zero = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    bad = ~torch.isfinite(torch.stack([zero, *largest])).all()
    return torch.stack([bad, torch.ones_like(bad)]).long()


_NORMED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
