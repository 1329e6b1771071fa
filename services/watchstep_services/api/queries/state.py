"""What queries of a process share: places, opened runs, and the bounds of the settings.

How much of one kind of work is under way at once: of one project, so that none takes all, and of the process.

Runs that are opened for queries, kept for a while: opening reads the footer of every segment.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request

from watchstep.errors import NotFoundError
from watchstep.format import documents
from watchstep.format.layout import RUN_DOCUMENT
from watchstep.reading.budget import ReadBudget
from watchstep.reading.run import Run
from watchstep.store.store import Store
from watchstep_services.api.lookup import damaged_segments, run_store
from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.service.context import Service


class Slots:
    """Places for work that occupies a thread. Thread-safe; who finds none is refused at once, for a queue would only hide it.

    Args:
        per_project: places of one project.
        total: places of the process.
        what: takes a place, in an error.
    """

    def __init__(self, per_project: int, total: int, what: str = "queries") -> None:
        self._per_project, self._total, self._what = per_project, total, what
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, project: str) -> Iterator[None]:
        """Hold a place for the length of the block.

        Args:
            project: whose place; empty for work of no project.

        Raises:
            RefusedError: 429; there is none.
        """
        with self._lock:
            if self._taken[project] >= self._per_project or self._taken.total() >= self._total:
                whose = (
                    f"of project {project}"
                    if project and self._taken[project] >= self._per_project
                    else "of all projects"
                )
                raise RequestRefusedError(
                    429,
                    f"too many {self._what} {whose} are under way",
                    "send it again when one of them is answered",
                )
            self._taken[project] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[project] -= 1
                if not self._taken[project]:
                    del self._taken[project]


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


_TOTAL = 8
"""Queries of a process that are under way at once: each takes a thread, and the others' requests need some too."""


_PARTS = 8


@dataclass(frozen=True)
class Queries:
    """Answers questions of one process.

    Attributes:
        service: whose runs.
        opened: runs that were asked lately.
        slots: for queries.
        sql_slots: for those in SQL, besides.
        part_threads: threads that read parts of answers that last as long as their clients read.
    """

    service: Service
    opened: OpenedRuns
    slots: Slots
    sql_slots: Slots
    part_threads: CapacityLimiter

    @classmethod
    def of(cls, service: Service) -> Queries:
        """Those of a service."""
        settings = service.settings
        processes = settings.query_processes
        return cls(
            service,
            OpenedRuns(),
            Slots(settings.project_queries, _TOTAL),
            Slots(max(1, processes // 2), processes, "SQL queries"),
            CapacityLimiter(_PARTS),
        )

    def budget(self) -> ReadBudget:
        """A budget that begins now."""
        return ReadBudget(self.service.settings.query_seconds, self.service.settings.query_mb)

    @contextmanager
    def asked(self, project: str, run: str) -> Iterator[tuple[Run, ReadBudget]]:
        """A run for one question, and its budget.

        Raises:
            NotFoundError: there is no such run, or nothing of it is recorded.
            RefusedError: 429; too many queries are under way.
            OverBudgetError, FormatError, StoreError: as `OpenedRuns.asked`.
        """
        store = run_store(self.service, project, run)
        with self.slots.taken(project):
            budget = self.budget()
            with self._opened(project, run, store, budget) as opened:
                yield opened, budget

    @contextmanager
    def asked_in_sql(
        self, project: str, run: str
    ) -> Iterator[tuple[Callable[[], AbstractContextManager[Run]], ReadBudget]]:
        """How to get a run for one query in SQL, and the query's budget. One project has half of the processes at the most.

        Raises:
            NotFoundError, RefusedError, OverBudgetError, FormatError, StoreError: as `asked`.
        """
        store = run_store(self.service, project, run)
        with self.slots.taken(project), self.sql_slots.taken(project):
            budget = self.budget()
            yield partial(self._opened, project, run, store, budget), budget

    @contextmanager
    def _opened(self, project: str, run: str, store: Store, budget: ReadBudget) -> Iterator[Run]:
        """The run, without the segments that evaluations left out."""
        damaged = damaged_segments(self.service, project, run)
        with self.opened.asked(store, budget) as opened:
            opened.index.exclude(damaged)
            yield opened

    @contextmanager
    def looked_at(self, project: str, run: str) -> Iterator[Store]:
        """A run's place on the store, for one question.

        Raises:
            NotFoundError: there is no such run.
            RefusedError: 429; too many queries are under way.
        """
        store = run_store(self.service, project, run)
        with self.slots.taken(project):
            yield store


async def _queries(request: Request) -> Queries:
    held = request.app.state.queries
    assert isinstance(held, Queries)
    return held


Asking = Annotated[Queries, Depends(_queries)]


def _opened(store: Store, budget: ReadBudget) -> Run:
    try:
        data = store.get(RUN_DOCUMENT, limit=documents.MAX_BYTES)
    except NotFoundError:
        raise NotFoundError(
            f"run {store.location}: nothing is recorded on the store", "ask again when the run has begun"
        ) from None
    return Run(store, documents.decode(documents.RunDocument, data, store.location), budget)
