"""Results on their way to the host: pinned memory, and how to tell that they are there.

Nothing here calls CUDA to wait. An event's `synchronize` or `query` from the writer's thread would spoil a graph that
the training thread captures at that moment. A copy of a one, in the stream's order after the results, is seen in pinned
memory instead.
"""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from watchstep.errors import WatchstepError

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
