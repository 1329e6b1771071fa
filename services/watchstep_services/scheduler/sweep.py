"""Look for work without a hint, so that a lost hint costs latency and never an event."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Select, select, update
from sqlalchemy.exc import SQLAlchemyError

from watchstep.errors import WatchstepError
from watchstep_services import metrics
from watchstep_services.backtests import due_backtests
from watchstep_services.database.clock import now_ns
from watchstep_services.database.models import Run
from watchstep_services.dispatcher.dispatch import due_actions
from watchstep_services.dispatcher.grouping.flush import flush_due
from watchstep_services.evaluator.claim import MESSAGE_NS
from watchstep_services.evaluator.journal import unwritten, write_journal
from watchstep_services.registration import discover_runs
from watchstep_services.scheduler.looks import do_looks, tell
from watchstep_services.service import Service

_LOOKING_SECONDS = 5.0
_MOST_RUNS = 1000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """Ids of runs to evaluate, of actions to try, and of backtests to go on with."""

    runs: tuple[int, ...]
    actions: tuple[int, ...]
    backtests: tuple[int, ...] = ()

    def without(self, other: Work) -> Work:
        """What is not in another's."""
        return Work(
            tuple(run for run in self.runs if run not in set(other.runs)),
            tuple(action for action in self.actions if action not in set(other.actions)),
            tuple(number for number in self.backtests if number not in set(other.backtests)),
        )


@metrics.SWEEPS_FAILED.count_exceptions()
@metrics.SWEEP_SECONDS.time()
def sweep(service: Service) -> Work:
    """Find new runs, list silent ones, follow their lives, and say what is due.

    What is due of journals is written. A store that does not answer is told in the log and in the run's health, and keeps
    no other run from its turn.
    """
    try:
        discover_runs(service)
    except WatchstepError as error:
        _log.warning("runs cannot be looked for: %s", error.what)
    except SQLAlchemyError as error:
        _log.warning("runs cannot be looked for: %s; the next sweep tries again", error)
    do_looks(service, _LOOKING_SECONDS)
    try:
        _write_journals(service)
    except SQLAlchemyError as error:
        _log.warning("journals: %s; the next sweep tries again", error)
    return find_due(service)


def _write_journals(service: Service) -> None:
    for due in unwritten(service):
        try:
            write_journal(service, due)
        except WatchstepError as error:
            _log.warning("journal of %s/%s: %s", due.project, due.run, error.what)
            tell(service, due.run_id, error)
        except SQLAlchemyError:
            raise  # of all journals
        except Exception:  # noqa: BLE001 - a fault of ours with this journal; the others are written
            _log.exception("journal of %s/%s: cannot be written", due.project, due.run)
            metrics.SWEEP_FAULTS.labels("journal").inc()


def note_asked(service: Service, runs: Sequence[int]) -> None:
    """Messages are sent that ask for the evaluation of runs: under load the next sweep does not send them again."""
    if runs:
        with service.database.once() as session:
            session.execute(
                update(Run)
                .where(Run.id.in_(_free(runs)))
                .values(asked_ns=now_ns())
                .execution_options(synchronize_session=False)
            )


def _free(runs: Sequence[int]) -> Select[int]:
    """Those that nobody is writing: a worker that stands still in the middle of that must not hold up the sweep."""
    return select(Run.id).where(Run.id.in_(runs)).order_by(Run.id).with_for_update(skip_locked=True)


def find_due(service: Service) -> Work:
    """What is due by the database alone; groups of alerts that are due become actions of it.

    Runs whose message was sent a moment ago are left to it: under load it only waits for its turn.
    """
    flush_due(service)
    now = select(now_ns()).scalar_subquery()  # asked once, so that the index of what is due can be used
    with service.database.read() as session:
        runs = session.execute(
            select(Run.id)
            .where(Run.due_ns <= now, Run.lease_until_ns <= now, Run.asked_ns <= now - MESSAGE_NS)
            .order_by(Run.due_ns)
            .limit(_MOST_RUNS)
        ).scalars()
        return Work(tuple(runs), tuple(due_actions(service)), due_backtests(service))
