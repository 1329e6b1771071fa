"""Transfers of results to pinned memory. Needs no Triton, which only CUDA tensors need.

Nothing here waits by calling CUDA. `synchronize` or `query` of an event from the writer's thread would invalidate a graph that the
training thread is capturing. Instead, a number 1 is copied to pinned memory after the results, in stream order, and polled.
"""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from watchstep.errors import WatchstepError

_TIMEOUT = 300.0
_PAUSE = 0.0005
_MAX_PAUSE = 0.02


class DeviceError(WatchstepError):
    """A device did not respond, or must not be used now."""


class Landing:
    """Host memory for the results of a device.

    Attributes:
        results: Results on the host; valid once `arrived`.
        pinned: Whether the memory is pinned. Results of tensors in host memory use plain memory.
    """

    def __init__(self, memory: Tensor, *, pinned: bool) -> None:
        self.results = memory[:-1]
        self.pinned = pinned
        self._flag = flag = memory[-1:]
        self._flags = flag.numpy()

    def fill(self, results: Tensor) -> None:
        """Enqueue a copy of results on the current stream.

        Args:
            results: int64 of any length. The last number is 1, and signals that the others have arrived.
        """
        self._flags[0] = 0
        self.results[: len(results) - 1].copy_(results[:-1], non_blocking=True)
        self._flag.copy_(results[-1:], non_blocking=True)

    @property
    def arrived(self) -> bool:
        """Return whether the results have arrived."""
        return bool(self._flags[0])

    def wait(self) -> None:
        """Wait until the results have arrived. Called outside the training thread.

        Raises:
            DeviceError: The results did not arrive within five minutes.
        """
        deadline, pause = time.monotonic() + _TIMEOUT, _PAUSE
        while not self.arrived:
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"statistics from a device after {_TIMEOUT:.0f} s",
                    "see whether the training itself stands still",
                )
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)


class Landings:
    """Pool of `Landing` objects, which are reused after their release. Thread-safe.

    Allocation of pinned memory is expensive. At most eight free landings of each size are kept.
    """

    _MAX_FREE = 8

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[Landing]] = {}
        self._lock = threading.Lock()

    def take(self, numbers: int, *, pinned: bool) -> Landing:
        """Return a landing for at least a number of int64."""
        size = 1 << max(numbers - 1, 0).bit_length()
        with self._lock:
            free = self._free.get((size, pinned))
            if free:
                return free.pop()
        memory = torch.zeros(size + 1, dtype=torch.int64, pin_memory=pinned)
        return Landing(memory, pinned=pinned)

    def release(self, landing: Landing) -> None:
        """Return a landing to the pool, after its results have arrived and been read."""
        key = (landing.results.numel(), landing.pinned)
        with self._lock:
            free = self._free.setdefault(key, [])
            if len(free) < self._MAX_FREE:
                free.append(landing)
