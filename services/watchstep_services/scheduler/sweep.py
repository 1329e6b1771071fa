"""Look for work without a hint, so that a lost hint costs latency and never an event."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from watchstep.errors import WatchstepError
from watchstep_services import metrics
from watchstep_services.backtests import due_backtests
from watchstep_services.database.clock import now_ns, read_clock
from watchstep_services.database.models import Project, Run
from watchstep_services.dispatcher.dispatch import due_actions
from watchstep_services.dispatcher.grouping.flush import flush_due
from watchstep_services.evaluator.discover import discover, listing_due
from watchstep_services.evaluator.journal import unwritten, write_journal
from watchstep_services.evaluator.lifecycle import ENDED, advance_run
from watchstep_services.registration import discover_runs
from watchstep_services.service import Service
from watchstep_services.settings import nanoseconds
from watchstep_services.stores.place import StorePlace

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """Ids of runs to evaluate, of actions to try, and of backtests to go on with."""

    runs: tuple[int, ...]
    actions: tuple[int, ...]
    backtests: tuple[int, ...] = ()


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
    for run, place, now in _runs(service):
        try:
            if _wants_listing(service, run, place, now):
                discover(service, run.id)
            if run.state not in ENDED:
                advance_run(service, run.id)
        except WatchstepError as error:
            _log.warning("run %s/%s: %s", run.project, run.run, error.what)
            _tell(service, run.id, error)
        except SQLAlchemyError as error:
            _log.warning("run %s/%s: %s; the next sweep tries again", run.project, run.run, error)
    _write_journals(service)
    return find_due(service)


def _write_journals(service: Service) -> None:
    for due in unwritten(service):
        try:
            write_journal(service, due)
        except WatchstepError as error:
            _log.warning("journal of %s/%s: %s", due.project, due.run, error.what)
            _tell(service, due.run_id, error)


def find_due(service: Service) -> Work:
    """What is due by the database alone; groups of alerts that are due become actions of it."""
    flush_due(service)
    with service.database.read() as session:
        runs = session.execute(
            select(Run.id)
            .where(Run.due_ns.is_not(None), Run.due_ns <= now_ns(), Run.lease_until_ns <= now_ns())
            .order_by(Run.due_ns)
        ).scalars()
        return Work(tuple(runs), tuple(due_actions(service)), due_backtests(service))


def _runs(service: Service) -> list[tuple[Run, StorePlace, int]]:
    with service.database.read() as session:
        now = read_clock(session)
        rows = session.execute(
            select(Run, Project).join(Project, Project.name == Run.project).order_by(Run.id)
        ).all()
        return [(run, project.place, now) for run, project in rows]


def _wants_listing(service: Service, run: Run, place: StorePlace, now: int) -> bool:
    quiet_since = max(run.heard_ns, run.listed_ns) if run.listed_ns else 0
    if run.state in ENDED or run.state == "lost":
        # It may still get a late segment or another attempt, but that is rare.
        return now - quiet_since >= nanoseconds(service.settings.silent_seconds)
    return listing_due(service, place, quiet_since, now)


def _tell(service: Service, run_id: int, error: WatchstepError) -> None:
    with service.database.write() as session:
        run = session.get_one(Run, run_id)
        run.health = {**run.health, "store": error.what[:500]}
