"""Runs that are opened for queries, kept for a while: opening reads the footer of every segment."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from watchstep.errors import NotFoundError
from watchstep.format import documents
from watchstep.format.layout import RUN_DOCUMENT
from watchstep.reading.budget import ReadBudget
from watchstep.reading.run import Run
from watchstep.store.store import Store
from watchstep_services.api.schemas.problems import RequestRefusedError

_ENTRIES = 16
_MOST_BYTES = 512 * 1024 * 1024
"""Memory for what is known of the segments of all opened runs: some 10,000 segments with 90 columns each."""


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    run: Run | None = None
    memory: int = 0


class OpenedRuns:
    """The runs that were asked last. Thread-safe; one question to a run at a time."""

    def __init__(self, entries: int = _ENTRIES) -> None:
        self._entries = entries
        self._held: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def asked(self, store: Store, budget: ReadBudget) -> Iterator[Run]:
        """A run as it is now, for one question.

        Args:
            store: seen from the run.
            budget: of the question; waiting for another one to the same run counts.

        Raises:
            NotFoundError: nothing was recorded, yet or any more.
            FormatError, StoreError: it cannot be read.
            OverBudgetError: it takes too long.
            RefusedError: 429; another question took all the time.
        """
        entry = self._entry(store.location)
        if not entry.lock.acquire(timeout=budget.left_seconds):
            raise RequestRefusedError(
                429, "another query of this run takes long", "send it again in some seconds"
            )
        try:
            run = entry.run = _opened(store, budget) if entry.run is None else entry.run
            run.index.budget = budget
            run.refresh()
            yield run
        finally:
            if entry.run is not None:
                entry.run.index.budget = None
                entry.memory = entry.run.index.memory
            entry.lock.release()
            self._forget_some()

    def _forget_some(self) -> None:
        """Forget the runs that were asked longest ago, as far as all take too much memory."""
        with self._lock:
            while sum(entry.memory for entry in self._held.values()) > _MOST_BYTES:
                self._held.popitem(last=False)

    def _entry(self, location: str) -> _Entry:
        with self._lock:
            entry = self._held.setdefault(location, _Entry())
            self._held.move_to_end(location)
            while len(self._held) > self._entries:
                self._held.popitem(last=False)
            return entry


def _opened(store: Store, budget: ReadBudget) -> Run:
    try:
        data = store.get(RUN_DOCUMENT, limit=documents.MAX_BYTES)
    except NotFoundError:
        raise NotFoundError(
            f"run {store.location}: nothing is recorded on the store", "ask again when the run has begun"
        ) from None
    return Run(store, documents.decode(documents.RunDocument, data, store.location), budget)
