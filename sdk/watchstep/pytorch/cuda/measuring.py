"""Launches of the Triton kernels over many tensors: the table of addresses that a launch reads, and its results.

Results on their way to the host: pinned memory, and how to tell that they are there.

Nothing here calls CUDA to wait. An event's `synchronize` or `query` from the writer's thread would spoil a graph that
the training thread captures at that moment. A copy of a one, in the stream's order after the results, is seen in pinned
memory instead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from watchstep.errors import WatchstepError
from watchstep.format.statistics import StatisticsBatch
from watchstep.kernels.native_kernel import KINDS
from watchstep.pytorch.cuda import figures, programs
from watchstep.pytorch.cuda.programs import REGION, SPAN

_PATIENCE = 300.0
_PAUSE = 0.0005
_LONGEST_PAUSE = 0.02


class DeviceError(WatchstepError):
    """A device did not answer, or may not be asked."""


class Landing:
    """Pinned host memory that a device fills.

    Attributes:
        results: on the host; meaningful once `arrived`.
        pinned: whether it is pinned indeed, or plain memory, as tensors in host memory need it.
    """

    def __init__(self, memory: Tensor, *, pinned: bool) -> None:
        self.results = memory[:-1]
        self.pinned = pinned
        self._flag = flag = memory[-1:]
        self._flags = flag.numpy()

    def fill(self, results: Tensor) -> None:
        """Let the current stream copy results from its device, and say so afterwards.

        Args:
            results: int64, any number; the last is a one and says that the rest is there.
        """
        self._flags[0] = 0
        self.results[: len(results) - 1].copy_(results[:-1], non_blocking=True)
        self._flag.copy_(results[-1:], non_blocking=True)

    @property
    def arrived(self) -> bool:
        """Whether the results are there."""
        return bool(self._flags[0])

    def wait(self) -> None:
        """Until the results are there. Called off the training thread.

        Raises:
            DeviceError: they were not there after five minutes.
        """
        until, pause = time.monotonic() + _PATIENCE, _PAUSE
        while not self.arrived:
            if time.monotonic() > until:
                raise DeviceError(
                    f"statistics from a device after {_PATIENCE:.0f} s",
                    "see whether the training itself stands still",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


class Landings:
    """Landings of one kind of result, used again once they are given back. Thread-safe.

    Pinned memory is dear to allocate; at most eight free landings of a size are kept.
    """

    _MOST = 8

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[Landing]] = {}
        self._lock = threading.Lock()

    def take(self, numbers: int, *, pinned: bool) -> Landing:
        """One for so many int64, or for more."""
        size = 1 << max(numbers - 1, 0).bit_length()
        with self._lock:
            free = self._free.get((size, pinned))
            if free:
                return free.pop()
        memory = torch.zeros(size + 1, dtype=torch.int64, pin_memory=pinned)
        return Landing(memory, pinned=pinned)

    def release(self, landing: Landing) -> None:
        """It has arrived and been read."""
        key = (landing.results.numel(), landing.pinned)
        with self._lock:
            free = self._free.setdefault(key, [])
            if len(free) < self._MOST:
                free.append(landing)


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


_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Products and sums are not fused, so that figures do not depend on a version's default."""
_MEASURING = {**_OPTIONS, "maxnreg": 128}
"""So that four blocks, and not three, share a multiprocessor of 65,536 registers; nothing spills."""


class TritonKernel:
    """Statistics of tensors on one CUDA device: two launches, one copy, no wait.

    Args:
        programs: the compiled ones; interpreted by Triton, they take tensors in host memory.
    """

    def __init__(self, programs: ModuleType = programs) -> None:
        self._programs = programs
        self._tables = Tables()
        self._landings = Landings()
        self._turn = 0

    def measure(self, tensors: Sequence[Tensor]) -> OnItsWay:
        """Start to measure.

        Args:
            tensors: on one device, dense in any order, of the types in `tables.TYPES`; one or more.
        """
        device = tensors[0].device
        with _on(device):
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
        return OnItsWay(landing, self._landings, table.elements)

    def look(self, tensors: Sequence[Tensor]) -> Landing:
        """Start to look for NaN and infinity: tensors of fewer than 262,144 elements whole, of others an eighth.

        Args:
            tensors: as above.

        Returns:
            Where the answer lands: one number, not zero where something was found.
        """
        device = tensors[0].device
        self._turn = (self._turn + 1) % SLICES
        with _on(device):
            table = self._tables.of(tensors, "look")
            flag = torch.zeros(2, dtype=torch.int64, device=device)
            if table.programs:
                self._programs.look_at_spans[(table.programs,)](
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

    def looked(self, landing: Landing) -> None:
        """The answer was read."""
        self._landings.release(landing)


@dataclass
class OnItsWay:
    """A measurement that the device is at. Its memory is used again once it is collected."""

    _landing: Landing
    _landings: Landings
    _elements: NDArray[np.int64]
    _read: StatisticsBatch | None = None

    @property
    def nonfinite(self) -> bool | None:
        """Whether some element is NaN or infinite; None until the device is done."""
        if self._read is not None:
            return bool(self._read.nonfinite.any())
        if not self._landing.arrived:
            return None
        return bool(self._rows()[:, : figures.NEG_INF + 1].any())

    def collect(self) -> StatisticsBatch:
        """The statistics, one row a tensor; waits for the device.

        Raises:
            DeviceError: it did not answer within five minutes.
        """
        if self._read is None:
            self._landing.wait()
            self._read = figures.read_rows(self._rows(), self._elements)
            self._landings.release(self._landing)
        return self._read

    def _rows(self) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = self._landing.results.numpy()
        return rows[: len(self._elements) * figures.WIDTH].reshape(-1, figures.WIDTH)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
