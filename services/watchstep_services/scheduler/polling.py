"""Polling: a run without hints is polled. Its store is listed if it is quiet, and its lifecycle is advanced.

The database has the time of each run's next poll, and an announcement postpones it. So the cost of a sweep follows from the polls that
are due, not from the number of runs, and workers share them.
"""

from __future__ import annotations

import functools
import logging
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.exc import SQLAlchemyError

from watchstep.errors import WatchstepError
from watchstep_launch.backend import OVER
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.core.store_location import StorePlace
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.clock import now_ns, read_clock
from watchstep_services.db.lease import POLL_LEASE, unlocked
from watchstep_services.db.limits import is_of_all
from watchstep_services.db.models import BoundJobRow, Project, RunRow
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.lifecycle import ENDED, advance_run
from watchstep_services.service.context import Service

MOST_POLLS = 50
"""Polls that one worker claims at a time."""

LONGEST_QUIET_NS = 30 * NANOSECONDS
"""A run that announces is listed after being quiet for so long at the latest."""

_LONGEST_ENDED_NS = 86_400 * NANOSECONDS
_ENDED_SHARE = 4
"""A run that is over is listed again after this part of the time since its end: an attempt that begins anew in a bucket, and that
nobody announces, is found so late at the most."""
_JOB_POLL_NS = NANOSECONDS
_HEALTH = "store"
_TAKEN_NS = 30 * NANOSECONDS
_PUT_OFF_NS = NANOSECONDS
_LOCAL_SECONDS = 2.0
"""How long a sweep waits for polls of runs on local stores."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunPoll:
    """A poll that this worker has claimed.

    Attributes:
        run: its row, as it was.
        place: of its project on a store.
        now_ns: by the database's clock.
        has_job: a job is bound to its newest attempt and was not gone.
        taken_ns: fencing token of the claim: an announcement replaces it.
    """

    run: RunRow
    place: StorePlace
    now_ns: int
    has_job: bool
    taken_ns: int


def claim_polls(service: Service) -> list[RunPoll]:
    """Claim polls that are due, up to `MOST_POLLS`. No other worker claims them until they are done or the lease expires."""
    due = select(RunRow.id).where(POLL_LEASE.is_free()).order_by(RunRow.poll_ns).limit(MOST_POLLS)
    with service.database.write() as session:
        now = read_clock(session)
        tokens = POLL_LEASE.claim_all(session, RunRow.id.in_(unlocked(due, RunRow)), _TAKEN_NS)
        if not tokens:
            return []
        rows = session.execute(
            select(RunRow, Project, BoundJobRow.state)
            .join(Project, Project.name == RunRow.project)
            .outerjoin(
                BoundJobRow, (BoundJobRow.run_id == RunRow.id) & (BoundJobRow.attempt == RunRow.attempt)
            )
            .where(RunRow.id.in_(tokens))
            .order_by(RunRow.id)
        ).all()
        return [
            RunPoll(run, project.place, now, job is not None and job not in OVER, tokens[run.id])
            for run, project, job in rows
        ]


def poll_run(service: Service, poll: RunPoll) -> None:
    """Poll a run, and schedule its next poll.

    Errors are logged, recorded in the run's health, and delay no other run.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    try:
        _poll(service, poll)
    except Exception as error:
        if is_of_all(error):
            raise
        # Deleted meanwhile, or held by somebody who hangs: it is taken again when this look's time is over.
        _log.warning("run %s/%s: what was seen of it is not kept: %s", poll.run.project, poll.run.run, error)
        metrics.SWEEP_FAULTS.labels("run").inc()


def _poll(service: Service, poll: RunPoll) -> None:
    run, fresh, listed = poll.run, False, False
    try:
        if needs_listing(service, poll):
            listed, fresh = True, discover(service, run.id).fresh
        if run.state not in ENDED:
            advance_run(service, run.id)
        if listed and _HEALTH in run.health:
            record_store_health(service, run.id, None)
    except WatchstepError as error:
        _log.warning("run %s/%s: %s", run.project, run.run, error.what)
        record_store_health(service, run.id, error)
    except SQLAlchemyError as error:
        _log.warning("run %s/%s: %s; a later sweep tries again", run.project, run.run, error)
    except Exception as error:  # noqa: BLE001 - a fault of ours: told as this run's trouble, and no other run's
        _log.exception("run %s/%s cannot be looked at; a later sweep tries again", run.project, run.run)
        metrics.SWEEP_FAULTS.labels("run").inc()
        record_store_health(service, run.id, _fault(error))
    quiet = _poll_interval(service, poll, listed, fresh)
    with service.database.write() as session:
        row = session.get(RunRow, run.id)
        if row is None:
            return  # deleted meanwhile
        after = _next_poll_ns(service, row, poll, quiet)
        session.execute(
            update(RunRow)
            .where(RunRow.id == run.id)
            .values(poll_interval_ns=quiet)
            .execution_options(synchronize_session=False)
        )
        POLL_LEASE.release(session, run.id, poll.taken_ns, poll_ns=now_ns() + after)


def _fault(error: Exception) -> WatchstepError:
    return WatchstepError(
        f"the service failed on it ({type(error).__name__})", "see the service's log; please report it"
    )


def needs_listing(service: Service, poll: RunPoll) -> bool:
    """Whether a run has been quiet for so long that its store is worth a listing."""
    run = poll.run
    quiet_since = max(run.last_seen_ns, run.listed_ns) if run.listed_ns else 0
    quiet = poll.now_ns - quiet_since
    if run.state in ENDED or run.state == "lost":
        # It may still get a late segment or another attempt, but that is rare.
        return quiet >= nanoseconds(service.settings.silent_seconds)
    base = max(service.settings.listing_ns(local=poll.place.is_local), service.listing_times.pause_ns(run.id))
    return quiet >= base if poll.has_job else quiet >= max(base, run.poll_interval_ns)


def _poll_interval(service: Service, poll: RunPoll, listed: bool, fresh: bool) -> int:
    """How long a run may be quiet before it is looked at.

    A listing that found nothing new of a run that was heard of since the one before was in vain: it is only slower than we
    look. One that found what nobody announced was not.
    """
    if poll.has_job:
        return _JOB_POLL_NS  # that it is gone, only asking tells
    base = service.settings.listing_ns(local=poll.place.is_local)
    announces = poll.run.last_seen_ns > poll.run.listed_ns > 0
    before = max(base, poll.run.poll_interval_ns)
    if not listed:
        return before
    return min(2 * before, max(base, LONGEST_QUIET_NS)) if announces and not fresh else base


def _next_poll_ns(service: Service, row: RunRow, poll: RunPoll, poll_interval_ns: int) -> int:
    """Nanoseconds until the next poll."""
    if row.state in ENDED or row.state == "lost":
        silent = nanoseconds(service.settings.silent_seconds)
        # The longer it has been over the more seldom; spread, so that those that ended together are not listed together.
        since = (poll.now_ns - (row.ended_ns or poll.now_ns)) // _ENDED_SHARE
        return int(min(max(silent, since), max(silent, _LONGEST_ENDED_NS)) * (0.75 + (row.id % 64) / 128))
    return poll_interval_ns


def poll_due_runs(service: Service, seconds: float) -> None:
    """Claim polls and do them in batches, until none is due or the time is up.

    A store that does not answer keeps the runs on others from their turn for `Settings.store_wait_seconds`, and that once until it
    answers. Its own runs wait for each other; those that do not come to their turn are taken again later. Runs on local stores
    are looked at by threads that projects share: a run whose folder takes long to list keeps only its project's runs waiting.
    """
    began = time.monotonic()
    while taken := claim_polls(service):
        _do_portion(service, taken)
        if time.monotonic() - began >= seconds or len(taken) < MOST_POLLS:
            return


def _do_portion(service: Service, taken: list[RunPoll]) -> None:
    patience = service.settings.store_wait_seconds
    local: dict[Future[None], RunPoll] = {}
    for poll in taken:
        work = functools.partial(poll_run, service, poll)
        if poll.place.is_local:
            local[service.look_threads.submit(poll.run.project, work)] = poll
        else:
            service.patience.ask(poll.place.registration, work, patience, None)
    done, late = wait(local, _LOCAL_SECONDS)
    # Those that began go on in their threads; the others are taken again, behind what is due by then.
    _put_off(service, [local[future] for future in late if future.cancel()])
    for future in done:
        if not future.cancelled():  # as those are that wait while the service closes
            future.result()


def _put_off(service: Service, polls: list[RunPoll]) -> None:
    if not polls:
        return
    with service.database.once() as session:
        for poll in polls:
            POLL_LEASE.release(session, poll.run.id, poll.taken_ns, poll_ns=now_ns() + _PUT_OFF_NS)


def record_store_health(service: Service, run_id: int, error: WatchstepError | None) -> None:
    """Record the error of a run's store in its health, or clear it. A run that was deleted is skipped."""
    with service.database.write() as session:
        run = session.get(RunRow, run_id)
        if run is None:
            return
        others = {name: said for name, said in run.health.items() if name != _HEALTH}
        run.health = others if error is None else {**others, _HEALTH: error.what[:500]}
