"""Launches of the Triton kernels over many tensors: address tables, launches, and results. `arrival` transfers the results."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from watchstep.format.statistics import StatisticsBatch
from watchstep.kernels.native_kernel import KINDS
from watchstep.pytorch.cuda import figures, programs
from watchstep.pytorch.cuda.arrival import Landing, Landings
from watchstep.pytorch.cuda.programs import REGION, SPAN

Purpose = Literal["measure", "check"]
Region = tuple[int, int, int]

TYPES = {getattr(torch, name): kind for name, kind in KINDS.items() if name != "float64"}
"""Numbers of the element types that the kernels read. float64 is measured by separate operations."""

SLICES = 8
_MIN_SLICED = 1 << 18
"""Minimum number of elements of tensors that are checked by slices."""
_ALIGNED = 16
_MAX_TABLES = 32


@dataclass(frozen=True)
class Table:
    """A table on its device.

    Attributes:
        numbers: int64: `REGION` numbers per tensor, then the tensor of each program.
        regions: Number of tensors.
        programs: Number of programs of the launch.
        elements: Number of elements of each tensor, int64 of shape (regions,) on the host.
    """

    numbers: Tensor
    regions: int
    programs: int
    elements: NDArray[np.int64]


class Tables:
    """Creates tables, and caches the last ones: addresses of parameters do not change, and those of gradients are usually reused."""

    def __init__(self) -> None:
        self._tables_by_key: OrderedDict[tuple[object, ...], Table] = OrderedDict()

    def of(self, tensors: Sequence[Tensor], purpose: Purpose) -> Table:
        """Return the table of tensors on one device.

        Args:
            tensors: Dense tensors of `TYPES`.
            purpose: ``measure`` reads all elements; ``look`` checks large tensors by slices.
        """
        regions = tuple((tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype]) for tensor in tensors)
        device = tensors[0].device
        # A copy is ordered only on its own stream: another stream needs its own copy.
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (device, stream, purpose, regions)
        table = self._tables_by_key.get(key)
        if table is None:
            table = self._tables_by_key[key] = _create_table(regions, device, purpose)
            if len(self._tables_by_key) > _MAX_TABLES:
                self._tables_by_key.popitem(last=False)
        self._tables_by_key.move_to_end(key)
        return table


def _create_table(regions: tuple[Region, ...], device: torch.device, purpose: Purpose) -> Table:
    address, elements, kind = np.array(regions, np.int64).reshape(-1, 3).T
    size = np.array([dtype.itemsize for dtype in TYPES], np.int64)[
        np.searchsorted(list(TYPES.values()), kind)
    ]
    # Programs read 16 bytes per thread from aligned addresses, and mask elements before the tensor.
    start = address % _ALIGNED // size
    end = np.where(elements > 0, start + elements, 0)
    spans = -(-end // SPAN)
    if purpose == "check":
        large = elements >= _MIN_SLICED
        spans = np.where(large, -(-spans // SLICES), spans)
        kind = np.where(large, -1 - kind, kind)
    first = np.concatenate([[0], np.cumsum(spans)])
    numbers = np.empty(len(regions) * REGION + first[-1], np.int64)
    numbers[: len(regions) * REGION] = np.stack(
        [address - address % _ALIGNED, start, end, kind, first[:-1]], axis=1
    ).ravel()
    numbers[len(regions) * REGION :] = np.repeat(np.arange(len(regions)), spans)
    return Table(_to_device(numbers, device), len(regions), int(first[-1]), elements)


def _to_device(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy numbers to a device asynchronously, from pinned memory, which PyTorch keeps until the copy is complete."""
    on_host = torch.from_numpy(numbers)
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Products and sums are not fused, so that results do not depend on the default of a Triton version."""
_MEASURING = {**_OPTIONS, "maxnreg": 128}
"""With this limit four blocks instead of three share a multiprocessor of 65,536 registers, and nothing spills."""


class TritonKernel:
    """Statistics of tensors on one CUDA device: two launches, one copy, no wait.

    Args:
        programs: Module of the kernels. If Triton interprets them, they accept tensors in host memory.
    """

    def __init__(self, programs: ModuleType = programs) -> None:
        self._programs = programs
        self._tables = Tables()
        self._landings = Landings()
        self._turn = 0

    def measure(self, tensors: Sequence[Tensor]) -> PendingMeasurement:
        """Start a measurement.

        Args:
            tensors: One or more tensors on one device, dense in any order, of the types in `TYPES`.
        """
        device = tensors[0].device
        with _device_context(device):
            table = self._tables.of(tensors, "measure")
            rows = torch.zeros(table.regions * figures.WIDTH + 1, dtype=torch.int64, device=device)
            partials = torch.empty(
                max(table.programs, 1) * programs.PARTIAL, dtype=torch.float64, device=device
            )
            if table.programs:
                self._programs.measure_spans[(table.programs,)](
                    table.numbers,
                    partials,
                    rows,
                    table.regions,
                    programs.BLOCK,
                    programs.BLOCKS,
                    **_MEASURING,
                )
            self._programs.merge_spans[(table.regions,)](
                table.numbers, partials, rows, table.regions, table.programs, programs.MERGED, **_OPTIONS
            )
            landing = self._landings.take(len(rows) - 1, pinned=device.type == "cuda")
            landing.fill(rows)
        return PendingMeasurement(landing, self._landings, table.elements)

    def check_nonfinite(self, tensors: Sequence[Tensor]) -> Landing:
        """Start to search for NaN and infinity, in all elements of tensors with fewer than 262,144, and in an eighth of larger ones.

        Args:
            tensors: As for `measure`.

        Returns:
            A landing for one number, which is nonzero if NaN or infinity was found.
        """
        device = tensors[0].device
        self._turn = (self._turn + 1) % SLICES
        with _device_context(device):
            table = self._tables.of(tensors, "check")
            flag = torch.zeros(2, dtype=torch.int64, device=device)
            if table.programs:
                self._programs.check_spans[(table.programs,)](
                    table.numbers,
                    flag,
                    table.regions,
                    self._turn,
                    SLICES,
                    programs.BLOCK,
                    programs.BLOCKS,
                    **_OPTIONS,
                )
            else:
                flag[1:].fill_(1)
            landing = self._landings.take(1, pinned=device.type == "cuda")
            landing.fill(flag)
        return landing

    def release(self, landing: Landing) -> None:
        """Release a landing after its result has been read."""
        self._landings.release(landing)


@dataclass
class PendingMeasurement:
    """A measurement in progress on a device. Its memory is reused after it is collected."""

    _landing: Landing
    _landings: Landings
    _elements: NDArray[np.int64]
    _statistics: StatisticsBatch | None = None

    @property
    def nonfinite(self) -> bool | None:
        """Return whether some element is NaN or infinite; None until the device is done."""
        if self._statistics is not None:
            return bool(self._statistics.nonfinite.any())
        if not self._landing.arrived:
            return None
        return bool(self._rows()[:, : figures.NEG_INF + 1].any())

    def collect(self) -> StatisticsBatch:
        """Wait for the device, and return the statistics, one row per tensor.

        Raises:
            DeviceError: The device did not respond within five minutes.
        """
        if self._statistics is None:
            self._landing.wait()
            self._statistics = figures.read_rows(self._rows(), self._elements)
            self._landings.release(self._landing)
        return self._statistics

    def _rows(self) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = self._landing.results.numpy()
        return rows[: len(self._elements) * figures.WIDTH].reshape(-1, figures.WIDTH)


def _device_context(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
