"""One SELECT over a run's statistics: guarded as SQL rules are, and run in a child process that reaches nothing else.

The child asks for rows as the query needs them. They are read of the run as it was when the query began, so that others ask
the run meanwhile.
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

_MOST_TRIES = 3
"""A compaction that replaces what is read begins the query anew; one that is at it all the time ends it."""


def run_sql(
    asked: Callable[[], AbstractContextManager[Run]], question: Question, budget: ReadBudget
) -> QueryResult:
    """Run a query.

    Args:
        asked: gives the run, refreshed, while no other question is asked of it.
        question: the query.
        budget: of seconds, and of what the run's objects take.

    Raises:
        ConfigError: the query may not be run, has an error, or gives what cannot be written.
        OverBudgetError: it takes too long, or too much memory, or its answer is too large.
        RefusedError: 503; no process is free, or can be started. 429; another question takes the run's time.
        StoreError: the store cannot be read.
    """
    lost: CompactedSegmentLostError | None = None
    for _ in range(_MOST_TRIES):
        with asked() as run:
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
