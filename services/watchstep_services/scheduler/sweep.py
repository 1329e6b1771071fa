"""The sweep: finds due work without hints, so that a lost hint costs latency and never an event."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Select, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from watchstep.errors import WatchstepError
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.clock import follow_clock, now_ns
from watchstep_services.db.engine import is_of_all
from watchstep_services.db.lease import RUN_LEASE, unlocked
from watchstep_services.db.models import RunRow
from watchstep_services.dispatch.dispatch import due_actions
from watchstep_services.evaluation.backtests import due_backtests
from watchstep_services.evaluation.journal import Unwritten, unwritten, write_journal
from watchstep_services.notify.flush import flush_due
from watchstep_services.runs.claim import MESSAGE_NS
from watchstep_services.runs.registration import discover_runs
from watchstep_services.scheduler.polling import poll_due_runs, record_store_health
from watchstep_services.service.context import Service

_POLL_SECONDS = 5.0
_MOST_RUNS = 1000
_Result = TypeVar("_Result")
_Default = TypeVar("_Default")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """Ids of runs to evaluate, of actions to try, and of backtests to continue."""

    runs: tuple[int, ...]
    actions: tuple[int, ...]
    backtests: tuple[int, ...] = ()

    def without(self, other: Work) -> Work:
        """The work that the other does not contain."""
        return Work(
            tuple(run for run in self.runs if run not in set(other.runs)),
            tuple(action for action in self.actions if action not in set(other.actions)),
            tuple(number for number in self.backtests if number not in set(other.backtests)),
        )


@metrics.SWEEPS_FAILED.count_exceptions()
@metrics.SWEEP_SECONDS.time()
def sweep(service: Service) -> Work:
    """Find new runs, poll silent ones, write journals, and return the due work.

    A store that does not answer is reported in the log and in the run's health. An error with one project, run, journal or
    group of alerts does not affect the others.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    steps = _SweepSteps()
    steps.do("the clock", lambda: follow_clock(service.database), 0)
    steps.do("new runs", lambda: discover_runs(service), None)
    steps.do("polls of runs", lambda: poll_due_runs(service, _POLL_SECONDS), None)
    steps.do("journals", lambda: _write_journals(service), None)
    return find_due(service)


class _SweepSteps:
    """Steps of a sweep; a step that fails does not stop the others."""

    def __init__(self) -> None:
        self._failed: Exception | None = None
        self._done = 0

    def do(self, name: str, work: Callable[[], _Result], default: _Default) -> _Result | _Default:
        """The result of a step; the default if it failed, which is logged."""
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - logged; the other steps are executed
            self._failed = error
            metrics.SWEEP_FAULTS.labels("due").inc()
            is_expected = isinstance(error, (WatchstepError, SQLAlchemyError))
            _log.warning(
                "%s: %s; the next sweep tries again", name, error, exc_info=None if is_expected else error
            )
            return default
        self._done += 1
        return result

    def check(self) -> None:
        """Raise the last error, if no step succeeded."""
        if self._failed is not None and not self._done:
            raise self._failed


_JOURNAL_SECONDS = 2.0
"""Time after which a sweep begins no further part of a journal: due runs wait for it, and the next sweep goes on."""


def _write_journals(service: Service) -> None:
    until = time.monotonic() + _JOURNAL_SECONDS
    for due in unwritten(service):
        write = functools.partial(_write_journal, service, due, until)
        service.bulkhead.call(due.place.registration, write, service.settings.store_wait_seconds, None)
        if time.monotonic() >= until:
            return


def _write_journal(service: Service, due: Unwritten, until: float) -> None:
    try:
        write_journal(service, due, until)
    except WatchstepError as error:
        _log.warning("journal of %s/%s: %s", due.project, due.run, error.what)
        record_store_health(service, due.run_id, error)
    except Exception as error:
        if is_of_all(error):
            raise
        # An internal error with this journal, or its run was deleted meanwhile; the others are written.
        _log.exception("journal of %s/%s: cannot be written", due.project, due.run)
        metrics.SWEEP_FAULTS.labels("journal").inc()


def note_requested(service: Service, runs: Sequence[int]) -> None:
    """Record that messages for runs are sent, so that the next sweep does not repeat them under load."""
    if runs:
        with service.database.once() as session:
            session.execute(
                update(RunRow)
                .where(RunRow.id.in_(_free(runs)))
                .values(requested_ns=now_ns())
                .execution_options(synchronize_session=False)
            )


def _free(runs: Sequence[int]) -> Select[int]:
    """Runs with unlocked rows: a worker that hangs in a transaction must not block the sweep."""
    return unlocked(select(RunRow.id).where(RunRow.id.in_(runs)).order_by(RunRow.id), RunRow)


def find_due(service: Service) -> Work:
    """Due work according to the database alone. Due groups of alerts are flushed, and become actions.

    Runs with a recent message are left out, because under load the message only waits in its queue. An error in one
    of the steps does not affect the others.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    steps = _SweepSteps()
    steps.do("groups of alerts", lambda: flush_due(service), None)
    work = Work(
        steps.do("runs that are due", lambda: _due_runs(service), ()),
        steps.do("actions that are due", lambda: tuple(due_actions(service)), ()),
        steps.do("backtests that are due", lambda: due_backtests(service), ()),
    )
    steps.check()
    return work


def _due_runs(service: Service) -> tuple[int, ...]:
    now = select(
        now_ns()
    ).scalar_subquery()  # a subquery is evaluated once, so that the index on due_ns can be used
    with service.database.read() as session:
        return tuple(
            session.execute(
                select(RunRow.id)
                .where(
                    RunRow.due_ns <= now,
                    RUN_LEASE.is_free(now),
                    # A message sent in the future was sent before the database's clock was set back, and may be lost.
                    or_(RunRow.requested_ns <= now - MESSAGE_NS, RunRow.requested_ns > now),
                )
                .order_by(RunRow.due_ns)
                .limit(_MOST_RUNS)
            ).scalars()
        )
