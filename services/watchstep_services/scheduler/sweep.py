"""Find work without hints, so that a lost hint costs latency and never an event."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Select, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from watchstep.errors import WatchstepError
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.clock import follow_clock, now_ns
from watchstep_services.db.lease import RUN_LEASE, unlocked
from watchstep_services.db.limits import is_of_all
from watchstep_services.db.models import RunRow
from watchstep_services.dispatch.dispatch import due_actions
from watchstep_services.evaluation.backtests import due_backtests
from watchstep_services.evaluation.journal import Unwritten, unwritten, write_journal
from watchstep_services.notify.flush import flush_due
from watchstep_services.runs.claim import MESSAGE_NS
from watchstep_services.runs.registration import discover_runs
from watchstep_services.scheduler.polling import poll_due_runs, record_store_health
from watchstep_services.service.context import Service

_LOOKING_SECONDS = 5.0
_MOST_RUNS = 1000
_Came = TypeVar("_Came")
_Else = TypeVar("_Else")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """Ids of runs to evaluate, of actions to try, and of backtests to go on with."""

    runs: tuple[int, ...]
    actions: tuple[int, ...]
    backtests: tuple[int, ...] = ()

    def without(self, other: Work) -> Work:
        """The work that is not in another."""
        return Work(
            tuple(run for run in self.runs if run not in set(other.runs)),
            tuple(action for action in self.actions if action not in set(other.actions)),
            tuple(number for number in self.backtests if number not in set(other.backtests)),
        )


@metrics.SWEEPS_FAILED.count_exceptions()
@metrics.SWEEP_SECONDS.time()
def sweep(service: Service) -> Work:
    """Find new runs, poll silent ones, write journals, and return the work that is due.

    What is due of journals is written. A store that does not answer is told in the log and in the run's health. Whatever fails
    of this, with one project, run, journal or group of alerts, keeps no other from its turn.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    steps = _SweepSteps()
    steps.do("the clock", lambda: follow_clock(service.database), 0)
    steps.do("new runs", lambda: discover_runs(service), None)
    steps.do("polls of runs", lambda: poll_due_runs(service, _LOOKING_SECONDS), None)
    steps.do("journals", lambda: _write_journals(service), None)
    return find_due(service)


class _SweepSteps:
    """Steps of a sweep; a step that fails does not stop the others."""

    def __init__(self) -> None:
        self._failed: Exception | None = None
        self._done = 0

    def do(self, name: str, work: Callable[[], _Came], otherwise: _Else) -> _Came | _Else:
        """The result of a step; the other value where it failed, which is logged."""
        try:
            came = work()
        except Exception as error:  # noqa: BLE001 - told; the other steps are done
            self._failed = error
            metrics.SWEEP_FAULTS.labels("due").inc()
            is_expected = isinstance(error, (WatchstepError, SQLAlchemyError))
            _log.warning(
                "%s: %s; the next sweep tries again", name, error, exc_info=None if is_expected else error
            )
            return otherwise
        self._done += 1
        return came

    def check(self) -> None:
        """Raise the last error, if no step succeeded."""
        if self._failed is not None and not self._done:
            raise self._failed


def _write_journals(service: Service) -> None:
    for due in unwritten(service):
        write = functools.partial(_write_journal, service, due)
        service.patience.ask(due.place.registration, write, service.settings.store_wait_seconds, None)


def _write_journal(service: Service, due: Unwritten) -> None:
    try:
        write_journal(service, due)
    except WatchstepError as error:
        _log.warning("journal of %s/%s: %s", due.project, due.run, error.what)
        record_store_health(service, due.run_id, error)
    except Exception as error:
        if is_of_all(error):
            raise
        # A fault of ours with this journal, or its run is deleted meanwhile; the others are written.
        _log.exception("journal of %s/%s: cannot be written", due.project, due.run)
        metrics.SWEEP_FAULTS.labels("journal").inc()


def note_asked(service: Service, runs: Sequence[int]) -> None:
    """Messages are sent that ask for the evaluation of runs: under load the next sweep does not send them again."""
    if runs:
        with service.database.once() as session:
            session.execute(
                update(RunRow)
                .where(RunRow.id.in_(_free(runs)))
                .values(requested_ns=now_ns())
                .execution_options(synchronize_session=False)
            )


def _free(runs: Sequence[int]) -> Select[int]:
    """Those that nobody is writing: a worker that stands still in the middle of that must not hold up the sweep."""
    return unlocked(select(RunRow.id).where(RunRow.id.in_(runs)).order_by(RunRow.id), RunRow)


def find_due(service: Service) -> Work:
    """What is due by the database alone; groups of alerts that are due become actions of it.

    Runs whose message was sent a moment ago are left to it: under load it only waits for its turn. What fails of these keeps
    the others from nothing.

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
    now = select(now_ns()).scalar_subquery()  # asked once, so that the index of what is due can be used
    with service.database.read() as session:
        return tuple(
            session.execute(
                select(RunRow.id)
                .where(
                    RunRow.due_ns <= now,
                    RUN_LEASE.is_free(now),
                    # A message "sent" in the future was sent before the database's clock was set back: it may be lost.
                    or_(RunRow.requested_ns <= now - MESSAGE_NS, RunRow.requested_ns > now),
                )
                .order_by(RunRow.due_ns)
                .limit(_MOST_RUNS)
            ).scalars()
        )
