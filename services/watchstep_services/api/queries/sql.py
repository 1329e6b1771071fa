"""SQL queries over the statistics of a run: one SELECT, checked like SQL rules and run in an isolated child process.

The child requests rows as the query needs them. They are read from the state of the run at the start of the query, so that other
queries can use the run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from watchstep.reading.budget import ReadBudget
from watchstep.reading.compacted import CompactedSegmentLostError
from watchstep.reading.run import Run
from watchstep.reading.sql import scan_for
from watchstep_rules.custom.sandbox.process import StartError
from watchstep_rules.custom.sql.process import QueryResult, QuerySource, Question, select
from watchstep_services.api.schemas.problems import RequestRefusedError

_MAX_ATTEMPTS = 3
"""Attempts at a query. It is repeated if a compaction replaces segments that it reads, and fails if that happens each time."""


def run_sql(
    open_run: Callable[[], AbstractContextManager[Run]], question: Question, budget: ReadBudget
) -> QueryResult:
    """Run a query.

    Args:
        open_run: opens the refreshed run, and locks it against other queries.
        question: the query.
        budget: limits of time, and of memory for the run's objects.

    Raises:
        ConfigError: the query is not allowed, fails, or has a result that cannot be serialized.
        OverBudgetError: the query takes too long or too much memory, or its result is too large.
        RequestRefusedError: 503; no process is free, or none can be started. 429; another query occupies the run.
        StoreError: the store cannot be read.
    """
    lost: CompactedSegmentLostError | None = None
    for _ in range(_MAX_ATTEMPTS):
        with open_run() as run:
            if lost is not None:
                run.index.follow(lost)
            index = run.index.snapshot(budget)
        try:
            return select(question, QuerySource(index.tensors(), index.probes(), partial(scan_for, index)))
        except CompactedSegmentLostError as error:
            lost = error
        except StartError as error:
            raise RequestRefusedError(503, error.what, error.hint, {"retry-after": "1"}) from error
    assert lost is not None
    raise lost
