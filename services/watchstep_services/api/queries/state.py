"""What queries of a process share: places, opened runs, and the bounds of the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from watchstep.reading.budget import ReadBudget
from watchstep.reading.run import Run
from watchstep.store import Store
from watchstep_services.api.lookup import run_store
from watchstep_services.api.queries.opened import OpenedRuns
from watchstep_services.api.queries.slots import Slots
from watchstep_services.service import Service

_TOTAL = 8
"""Queries of a process that are under way at once: each takes a thread, and the others' requests need some too."""


@dataclass(frozen=True)
class Queries:
    """Answers questions of one process."""

    service: Service
    opened: OpenedRuns
    slots: Slots

    @classmethod
    def of(cls, service: Service) -> Queries:
        """Those of a service."""
        return cls(service, OpenedRuns(), Slots(service.settings.project_queries, _TOTAL))

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
            with self.opened.asked(store, budget) as opened:
                yield opened, budget

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
