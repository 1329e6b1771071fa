"""Limits of a query in seconds and in bytes that it keeps, and the process's memory limit for decoding objects."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from watchstep.errors import WatchstepError

_MEGABYTE = 1024 * 1024


class OverBudgetError(WatchstepError):
    """A query exceeds its budget. Objects read until then are not read again."""


class ReadBudget:
    """Budget of one query, starting at its creation. Checked between objects, each of which is bounded separately.

    Thread-safe.

    Args:
        seconds: time limit from now on.
        megabytes: limit of columns in memory at the same time.
    """

    def __init__(self, seconds: float, megabytes: float) -> None:
        self._seconds, self._megabytes = seconds, megabytes
        self._deadline = time.monotonic() + seconds
        self._remaining = megabytes * _MEGABYTE
        self._is_over = False
        self._lock = threading.Lock()

    def check(self) -> None:
        """Check the time and the memory.

        Raises:
            OverBudgetError: a limit is exceeded.
        """
        if self._is_over:
            raise OverBudgetError(
                f"the query needs more than {self._megabytes:g} MiB",
                "query fewer tensors, workers or steps",
            )
        if time.monotonic() > self._deadline:
            raise OverBudgetError(
                f"the query took more than {self._seconds:g} s",
                "query fewer tensors or steps; compacting the run makes queries faster (watchstep runs compact)",
            )

    def take(self, size: int) -> bool:
        """Reserve bytes that stay until the answer. Returns whether they fit.

        If they do not, every later `check` raises, even after a release, because rows were omitted. Reader threads
        use this method instead of `keep`, because the traceback of an exception would keep the bytes in memory.
        """
        with self._lock:
            self._remaining -= size
            self._is_over = self._is_over or self._remaining < 0
            return not self._is_over

    def keep(self, size: int) -> None:
        """Reserve bytes that stay until the answer.

        Raises:
            OverBudgetError: a limit is exceeded.
        """
        self.take(size)
        self.check()

    def release(self, size: int) -> None:
        """Release reserved bytes."""
        with self._lock:
            self._remaining += size

    @property
    def remaining_seconds(self) -> float:
        """Remaining seconds, at least 0."""
        return max(0.0, self._deadline - time.monotonic())


class LongTexts:
    """Turns for parsing long texts, of queries with a budget. Thread-safe.

    Python parses a text in one go, during which no other thread runs. So one is parsed at a time, and after it no other for four times as long as it took.
    """

    _LONG = 1024 * 1024
    _PAUSE = 4.0

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._next = 0.0

    @contextmanager
    def turn(self, size: int, budget: ReadBudget | None) -> Iterator[None]:
        """Wait for the turn of a text, and have it within the block.

        Args:
            size: bytes of the text.
            budget: its time limits the wait; None for a program that reads by itself, and does not wait.

        Raises:
            OverBudgetError: the budget's time is exceeded.
        """
        if size < self._LONG or budget is None:
            yield
            return
        if not self._turn.acquire(timeout=budget.remaining_seconds):
            raise OverBudgetError("other queries read long documents", "retry in some seconds")
        began = None
        try:
            pause = self._next - time.monotonic()
            if pause > 0:
                time.sleep(min(pause, budget.remaining_seconds))
                budget.check()
            began = time.monotonic()
            yield
        finally:
            now = time.monotonic()
            if began is not None:
                self._next = now + self._PAUSE * (now - began)
            self._turn.release()


LONG_TEXTS = LongTexts()
"""Those of this process."""


MAX_BYTES = 384 * 1024 * 1024
"""Limit of decoded bytes of all objects together. One object has at most 256 MiB, so each fits."""


class DecodingMemory:
    """Memory for decoding, shared by all threads of a process. Thread-safe.

    An object's columns are decoded completely before the selected rows are extracted. Without a common limit, each reader
    thread of each query would have such an object in memory at the same time.

    Args:
        max_bytes: limit of decoded bytes. Larger objects are refused.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._limit = max_bytes
        self._taken = 0
        self._freed = threading.Condition()

    def check_size(self, size: int, name: str) -> None:
        """Check that a size does not exceed the limit by itself.

        Raises:
            OverBudgetError: it does.
        """
        if size > self._limit:
            raise OverBudgetError(
                f"{name}: reading it may take {size / _MEGABYTE:,.0f} MiB of memory, and {self._limit / _MEGABYTE:,.0f} MiB are allowed",
                "read it without the service, with watchstep.open_run or the watchstep command",
            )

    @contextmanager
    def reserve(self, size: int, budget: ReadBudget | None, name: str) -> Iterator[None]:
        """Reserve memory within the block; waits until enough is free.

        Args:
            size: decoded bytes.
            budget: its time limits the wait.
            name: what is decoded, for messages.

        Raises:
            OverBudgetError: the size exceeds the limit by itself, or the budget's time is exceeded.
        """
        self.check_size(size, name)
        with self._freed:
            timeout = None if budget is None else budget.remaining_seconds
            if not self._freed.wait_for(lambda: self._taken + size <= self._limit, timeout):
                raise OverBudgetError(
                    "other queries use all the memory for reading",
                    "retry in some seconds, or query fewer tensors or steps",
                )
            self._taken += size
        try:
            yield
        finally:
            with self._freed:
                self._taken -= size
                self._freed.notify_all()


PROCESS = DecodingMemory()
"""The memory of this process."""
