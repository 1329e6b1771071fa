"""Limits of one query, in seconds and in bytes that it keeps, and the memory of the process for objects being decoded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from watchstep.errors import WatchstepError

_MEGABYTE = 1024 * 1024


class OverBudgetError(WatchstepError):
    """A question took more than it may; what was found of the run's objects until then is not read again."""


class ReadBudget:
    """A budget of one question; begins when it is made. Looked at between objects, each of which is bounded by itself.

    Thread-safe.

    Args:
        seconds: from now on.
        megabytes: of columns that are held at once.
    """

    def __init__(self, seconds: float, megabytes: float) -> None:
        self._seconds, self._megabytes = seconds, megabytes
        self._deadline = time.monotonic() + seconds
        self._left = megabytes * _MEGABYTE
        self._is_over = False
        self._lock = threading.Lock()

    def check(self) -> None:
        """See to the time and the memory.

        Raises:
            OverBudgetError: the time is up, or the bytes are too many.
        """
        if self._is_over:
            raise OverBudgetError(
                f"the question needs more than {self._megabytes:g} MiB",
                "ask for fewer tensors, workers or steps",
            )
        if time.monotonic() > self._deadline:
            raise OverBudgetError(
                f"the question took more than {self._seconds:g} s",
                "ask for fewer tensors or steps; a run that is compacted answers sooner (watchstep runs compact)",
            )

    def take(self, size: int) -> bool:
        """Account for bytes that stay until the answer; whether they fit.

        If they do not, every later `check` raises, whatever is released: rows were left out for it. A thread that reads for
        another one asks here: an error that it raised would keep the bytes in memory by its traceback.
        """
        with self._lock:
            self._left -= size
            self._is_over = self._is_over or self._left < 0
            return not self._is_over

    def keep(self, size: int) -> None:
        """Account for bytes that stay until the answer.

        Raises:
            OverBudgetError: they are too many, or the time is up.
        """
        self.take(size)
        self.check()

    def release(self, size: int) -> None:
        """Account for bytes that were kept and are needed no longer."""
        with self._lock:
            self._left += size

    @property
    def left_seconds(self) -> float:
        """Seconds that are left; 0 where none are."""
        return max(0.0, self._deadline - time.monotonic())


MOST_BYTES = 384 * 1024 * 1024
"""Decoded bytes of all objects at once. One object has at most 256 MiB, so each fits."""


class DecodingMemory:
    """Memory for decoding, shared by all threads of a process. Thread-safe.

    An object's columns are decoded whole before the wanted rows are taken out of them. Without a common limit each reader
    thread of each query has such an object in memory at the same time.

    Args:
        most_bytes: decoded bytes at once. An object that is larger is decoded while no other one is.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._taken = 0
        self._freed = threading.Condition()

    @contextmanager
    def reserve(self, size: int, budget: ReadBudget | None = None) -> Iterator[None]:
        """Reserve memory for the length of the block; waits until others have freed it.

        Args:
            size: decoded bytes.
            budget: its time limits the wait.

        Raises:
            OverBudgetError: the budget's time is up.
        """
        size = min(size, self._most)
        with self._freed:
            timeout = None if budget is None else budget.left_seconds
            if not self._freed.wait_for(lambda: self._taken + size <= self._most, timeout):
                raise OverBudgetError(
                    "queries that are under way take all the memory for reading",
                    "ask again in some seconds, or for fewer tensors or steps",
                )
            self._taken += size
        try:
            yield
        finally:
            with self._freed:
                self._taken -= size
                self._freed.notify_all()


PROCESS = DecodingMemory()
"""Of this process."""
