"""Shared state of the queries of a process: slots, opened runs, and budgets.

Slots limit concurrent work, per project so that none occupies all, and per process. Opened runs are cached, because opening a run reads
the footer of every segment.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request

from watchstep.errors import FormatError, NotFoundError, StoreError, WatchstepError
from watchstep.format import documents
from watchstep.format.layout import RUN_DOCUMENT
from watchstep.reading.budget import OverBudgetError, ReadBudget
from watchstep.reading.run import Run
from watchstep.store.store import Store
from watchstep_services.api.lookup import damaged_segments, run_store
from watchstep_services.api.queries.traces import OpenedTraces
from watchstep_services.api.queries.view_cache import ViewCache
from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.service.context import Service

UNREADABLE = (NotFoundError, FormatError, StoreError, OverBudgetError)
"""Errors of a run whose statistics cannot be read, while the rest of its pages can be shown."""


class Slots:
    """Slots for work that occupies a thread. Thread-safe.

    A request without a free slot is refused at once, because a queue would hide the overload.

    Args:
        per_project: slots of one project.
        total: slots of the process.
        what: name of the work in errors.
    """

    def __init__(self, per_project: int, total: int, what: str = "queries") -> None:
        self._per_project, self._total, self._what = per_project, total, what
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def acquire(self, project: str) -> Iterator[None]:
        """Occupy a slot during the block.

        Args:
            project: project of the work; empty: none.

        Raises:
            RequestRefusedError: 429; no slot is free.
        """
        with self._lock:
            if self._used[project] >= self._per_project or self._used.total() >= self._total:
                owner = (
                    f"of project {project}"
                    if project and self._used[project] >= self._per_project
                    else "of all projects"
                )
                raise RequestRefusedError(
                    429,
                    f"too many {self._what} {owner} are in progress",
                    "repeat the request after one of them has ended",
                )
            self._used[project] += 1
        try:
            yield
        finally:
            with self._lock:
                self._used[project] -= 1
                if not self._used[project]:
                    del self._used[project]


_ENTRIES = 16


_MOST_BYTES = 512 * 1024 * 1024
"""Memory for the indexes and documents of all opened runs: about 10,000 segments with 90 columns each."""


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    run: Run | None = None
    document_memory: int = 0
    memory: int = 0


class OpenedRuns:
    """Cache of recently opened runs. Thread-safe; one query of a run at a time."""

    def __init__(self, entries: int = _ENTRIES) -> None:
        self._entries = entries
        self._cached: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def open(self, store: Store, budget: ReadBudget) -> Iterator[Run]:
        """Open a run in its current state for one query.

        Args:
            store: store with paths relative to the run.
            budget: budget of the query; includes the wait for another query of the same run.

        Raises:
            NotFoundError: the store contains no data of the run.
            FormatError, StoreError: the run cannot be read.
            OverBudgetError: the query takes too long.
            RequestRefusedError: 429; another query of the run took all the time.
        """
        with self._reserved([store], budget) as (entry,), _opened_for(entry, store, budget) as run:
            yield run

    @contextmanager
    def open_several(
        self, stores: Mapping[str, Store], budget: ReadBudget
    ) -> Iterator[dict[str, Run | WatchstepError]]:
        """Open several runs in their current states for one query. A run that cannot be read is represented by the error.

        Args:
            stores: store of each run, with paths relative to it; at least one.
            budget: budget of the query; includes the wait for other queries of these runs.

        Raises:
            RequestRefusedError: 429; other queries of the runs took all the time.
        """
        # Always in the same order, so that two queries rarely get a part of each other's runs.
        ordered = sorted(stores.items(), key=lambda item: item[1].location)
        with self._reserved([store for _, store in ordered], budget) as entries, ExitStack() as stack:
            opened: dict[str, Run | WatchstepError] = {}
            for (run, store), entry in zip(ordered, entries, strict=True):
                try:
                    opened[run] = stack.enter_context(_opened_for(entry, store, budget))
                except UNREADABLE as error:
                    opened[run] = error
            yield opened

    @contextmanager
    def _reserved(self, stores: Sequence[Store], budget: ReadBudget) -> Iterator[list[_Entry]]:
        """Reserve the runs of some stores during the block: all of them or none.

        Raises:
            RequestRefusedError: 429; other queries of the runs took all the time.
        """
        entries = [self._entry(store.location) for store in stores]
        if not _acquire_all([entry.lock for entry in entries], budget):
            what = "this run" if len(entries) == 1 else "one of these runs"
            raise RequestRefusedError(
                429, f"another query of {what} is in progress", "repeat the request in some seconds"
            )
        try:
            yield entries
        finally:
            for entry in entries:
                entry.lock.release()
            self._evict()

    def _evict(self) -> None:
        """Remove the least recently used runs until the cache fits its memory limit."""
        with self._lock:
            while sum(entry.memory for entry in self._cached.values()) > _MOST_BYTES:
                self._cached.popitem(last=False)

    def _entry(self, location: str) -> _Entry:
        with self._lock:
            entry = self._cached.setdefault(location, _Entry())
            self._cached.move_to_end(location)
            while len(self._cached) > self._entries:
                self._cached.popitem(last=False)
            return entry


_TOTAL = 8
"""Concurrent queries of a process. Each occupies a thread, and other requests need threads too."""


_PARTS = 8


@dataclass(frozen=True)
class Queries:
    """Opens runs for the queries of one process.

    Attributes:
        service: the service.
        opened: cache of opened runs.
        slots: slots of all queries.
        sql_slots: additional slots of SQL queries.
        part_threads: threads that read parts of streamed responses.
        traces: cache of opened traces.
        views: cache of encoded views.
        page_lock: held by the one request that reads a large page of a list.
    """

    service: Service
    opened: OpenedRuns
    slots: Slots
    sql_slots: Slots
    part_threads: CapacityLimiter
    traces: OpenedTraces
    views: ViewCache
    page_lock: threading.Lock

    @classmethod
    def of(cls, service: Service) -> Queries:
        """Create the state for a service."""
        settings = service.settings
        processes = settings.query_processes
        return cls(
            service,
            OpenedRuns(),
            Slots(settings.project_queries, _TOTAL),
            Slots(max(1, processes // 2), processes, "SQL queries"),
            CapacityLimiter(_PARTS),
            OpenedTraces(),
            ViewCache(),
            threading.Lock(),
        )

    def budget(self) -> ReadBudget:
        """Start a new budget."""
        return ReadBudget(self.service.settings.query_seconds, self.service.settings.query_mb)

    @contextmanager
    def large_page(self, project: str) -> Iterator[None]:
        """Occupy a slot for a page of a list that takes megabytes, one at a time: each occupies the interpreter while it is built and encoded.

        Raises:
            RequestRefusedError: 429; too many queries are in progress, or other pages took all the time.
        """
        with self.slots.acquire(project):
            if not self.page_lock.acquire(timeout=self.service.settings.query_seconds):
                raise RequestRefusedError(
                    429, "other large pages of lists are in progress", "repeat the request in some seconds"
                )
            try:
                yield
            finally:
                self.page_lock.release()

    @contextmanager
    def open_run(self, project: str, run: str) -> Iterator[tuple[Run, ReadBudget]]:
        """Open a run for one query, with its budget.

        Raises:
            NotFoundError: the run does not exist, or the store contains no data of it.
            RequestRefusedError: 429; too many queries are in progress.
            OverBudgetError, FormatError, StoreError: as `OpenedRuns.open`.
        """
        store = run_store(self.service, project, run)
        with self.slots.acquire(project):
            budget = self.budget()
            with self._opened(project, run, store, budget) as opened:
                yield opened, budget

    @contextmanager
    def open_runs(
        self, project: str, runs: Sequence[str]
    ) -> Iterator[tuple[dict[str, Run | WatchstepError], ReadBudget]]:
        """Open several runs for one query, with one slot and one budget.

        A run whose statistics cannot be opened is represented by the error. The query waits for all runs or has all of them: while it waits
        for a busy run, other queries may use the others.

        Raises:
            NotFoundError: a run does not exist.
            RequestRefusedError: 429; too many queries are in progress.
        """
        stores = {run: run_store(self.service, project, run) for run in runs}
        with self.slots.acquire(project):
            budget = self.budget()
            damaged = {run: damaged_segments(self.service, project, run) for run in runs}
            with self.opened.open_several(stores, budget) as opened:
                for name, run in opened.items():
                    if isinstance(run, Run):
                        run.index.exclude(damaged[name])
                yield opened, budget

    @contextmanager
    def open_sql(
        self, project: str, run: str
    ) -> Iterator[tuple[Callable[[], AbstractContextManager[Run]], ReadBudget]]:
        """Return a function that opens a run for a SQL query, and its budget. One project may use half of the processes.

        Raises:
            NotFoundError, RequestRefusedError, OverBudgetError, FormatError, StoreError: as `open_run`.
        """
        store = run_store(self.service, project, run)
        with self.slots.acquire(project), self.sql_slots.acquire(project):
            budget = self.budget()
            yield partial(self._opened, project, run, store, budget), budget

    @contextmanager
    def _opened(self, project: str, run: str, store: Store, budget: ReadBudget) -> Iterator[Run]:
        """Open a run without the segments that evaluations skipped."""
        damaged = damaged_segments(self.service, project, run)
        with self.opened.open(store, budget) as opened:
            opened.index.exclude(damaged)
            yield opened

    @contextmanager
    def open_store(self, project: str, run: str) -> Iterator[Store]:
        """Open the store of a run for one query.

        Raises:
            NotFoundError: the run does not exist.
            RequestRefusedError: 429; too many queries are in progress.
        """
        store = run_store(self.service, project, run)
        with self.slots.acquire(project):
            yield store


def recorded_state(run: Run) -> list[str]:
    """Return what identifies the statistics that queries of an opened run read. Objects never change, so nothing is read for it."""
    objects = [f"{located.object.key}<{located.cut}" for located in run.index.objects()]
    return [hashlib.sha256("\n".join(objects).encode()).hexdigest(), *sorted(run.index.damaged)]


async def _queries(request: Request) -> Queries:
    queries = request.app.state.queries
    assert isinstance(queries, Queries)
    return queries


Querying = Annotated[Queries, Depends(_queries)]


def _acquire_all(locks: Sequence[threading.Lock], budget: ReadBudget) -> bool:
    """Acquire all locks or none. Returns False if the remaining time of the budget was not enough.

    It never waits for a lock while it has another, whose users would wait for a lock that they do not need.
    """
    awaited = locks[0]
    while awaited.acquire(timeout=budget.remaining_seconds):
        acquired = [awaited]
        for lock in locks:
            if lock is awaited:
                continue
            if not lock.acquire(blocking=False):
                break
            acquired.append(lock)
        else:
            return True
        for taken in acquired:
            taken.release()
        awaited = lock
    return False


@contextmanager
def _opened_for(entry: _Entry, store: Store, budget: ReadBudget) -> Iterator[Run]:
    """Open the run of a reserved entry in its current state during the block."""
    try:
        run = entry.run = _opened(entry, store, budget) if entry.run is None else entry.run
        run.index.budget = budget
        run.refresh()
        yield run
    finally:
        if entry.run is not None:
            entry.run.index.budget = None
            entry.memory = entry.run.index.memory + entry.document_memory


def _opened(entry: _Entry, store: Store, budget: ReadBudget) -> Run:
    try:
        data = store.get(RUN_DOCUMENT, limit=documents.MAX_BYTES)
    except NotFoundError:
        raise NotFoundError(
            f"run {store.location}: nothing is recorded on the store",
            "repeat the query after the run has started",
        ) from None
    entry.document_memory = documents.memory_needed(data)
    return Run(store, documents.decode(documents.RunDocument, data, store.location), budget)
