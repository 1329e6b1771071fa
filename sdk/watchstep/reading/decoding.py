"""How much memory a process takes for objects that are being decoded, whoever asks for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from watchstep.reading.budget import OverBudgetError, ReadBudget

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
