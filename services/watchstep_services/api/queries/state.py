"""What queries of a process share: places, opened runs, and the bounds of the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request

from watchstep.reading.budget import ReadBudget
from watchstep.reading.run import Run
from watchstep.store.store import Store
from watchstep_services.api.lookup import damaged_segments, run_store
from watchstep_services.api.queries.opened import OpenedRuns
from watchstep_services.api.queries.slots import Slots
from watchstep_services.service.context import Service

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
