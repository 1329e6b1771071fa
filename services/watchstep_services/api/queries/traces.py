"""Opening of operation traces for requests: a cache of bounded memory, and opening within the memory for decoding."""

from __future__ import annotations

import threading
from collections import OrderedDict

from watchstep.errors import NotFoundError
from watchstep.format.documents import memory_needed
from watchstep.reading.budget import PROCESS, OverBudgetError, ReadBudget
from watchstep.store.store import Store
from watchstep.trace.indexed_trace import IndexedTrace, TraceArchive, index_trace, memory_to_index

_MAX_BYTES = 256 * 1024 * 1024
"""Memory for all opened traces."""

_READ_FACTOR = 2
"""Memory while the members of the archive are read, as a multiple of their size."""

_Key = tuple[str, str, int]


class OpenedTraces:
    """Cache of recently opened traces, which never change. Thread-safe.

    Args:
        max_bytes: memory of all cached traces; the last one stays, even if it exceeds the limit by itself.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._limit = max_bytes
        self._opening = threading.Lock()
        self._cached: OrderedDict[_Key, IndexedTrace] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, store: Store, path: str, budget: ReadBudget) -> IndexedTrace:
        """Open a trace.

        Args:
            store: store with paths relative to the run.
            path: key of the trace.
            budget: budget of the query; includes the wait for memory.

        Raises:
            NotFoundError: the trace does not exist.
            FormatError: it is damaged, or too large for the API.
            StoreError: the store cannot be read.
            OverBudgetError: the query takes too long, or the trace needs more memory than one may.
        """
        try:
            size = store.size(path)
        except NotFoundError as error:
            raise NotFoundError(f"trace {path}: not found", "list the traces of the run") from error
        key = store.location, path, size
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
        # One at a time: a second thread that reserves more while it keeps what it has read could wait for the first for ever.
        if not self._opening.acquire(timeout=budget.remaining_seconds):
            raise OverBudgetError("other traces are opened", "retry in some seconds")
        try:
            with self._lock:
                opened = self._cached.get(key)
            if opened is None:
                opened = _opened(store, path, size, budget)
        finally:
            self._opening.release()
        with self._lock:
            self._cached[key] = opened
            self._cached.move_to_end(key)
            while len(self._cached) > 1 and sum(each.memory for each in self._cached.values()) > self._limit:
                self._cached.popitem(last=False)
        return opened


def _opened(store: Store, path: str, size: int, budget: ReadBudget) -> IndexedTrace:
    archive = TraceArchive(store, path, size)
    read = _READ_FACTOR * (archive.head_bytes + archive.operations_bytes)
    with PROCESS.reserve(read, budget, path):
        head, operations = archive.head(), archive.operations()
        budget.check()
        # Parsing takes several times the memory of the text, so it is reserved by what the text contains.
        needed = memory_needed(head) + memory_to_index(operations, budget.check)
        PROCESS.check_size(needed, path)
        with PROCESS.reserve(max(0, needed - read), budget, path):
            return index_trace(path, head, operations, budget.check)
