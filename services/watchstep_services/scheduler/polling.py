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
from watchstep_services.db.engine import is_of_all
from watchstep_services.db.lease import POLL_LEASE, unlocked
from watchstep_services.db.models import BoundJobRow, RunRow
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.lifecycle import ENDED, advance_run, record_job
from watchstep_services.service.context import Service

MOST_POLLS = 50
"""Polls that one worker claims at a time."""

LONGEST_QUIET_NS = 30 * NANOSECONDS
"""Longest time without news after which an announcing run is listed."""

_LONGEST_ENDED_NS = 86_400 * NANOSECONDS
_ENDED_SHARE = 4
"""An ended run is listed again after this part of the time since its end, which bounds the delay until an unannounced new attempt
in a bucket is found."""
_JOB_POLL_NS = NANOSECONDS
_HEALTH = "store"
_TAKEN_NS = 30 * NANOSECONDS
_PUT_OFF_NS = NANOSECONDS
_LOCAL_SECONDS = 2.0
"""Time for which a sweep waits for polls of runs on local stores."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunPoll:
    """A poll that this worker has claimed.

    Attributes:
        run: its row at the claim.
        place: the location of the run.
        now_ns: time by the database's clock.
        has_job: its newest attempt has a bound job that was not gone.
        taken_ns: fencing token of the claim; an announcement replaces it.
    """

    run: RunRow
    place: StorePlace
    now_ns: int
    has_job: bool
    taken_ns: int


def claim_polls(service: Service) -> list[RunPoll]:
    """Claim due polls, up to `MOST_POLLS`. No other worker claims them until they are released or the lease expires."""
    due = select(RunRow.id).where(POLL_LEASE.is_free()).order_by(RunRow.poll_ns).limit(MOST_POLLS)
    with service.database.write() as session:
        now = read_clock(session)
        tokens = POLL_LEASE.claim_all(session, RunRow.id.in_(unlocked(due, RunRow)), _TAKEN_NS)
        if not tokens:
            return []
        rows = session.execute(
            select(RunRow, BoundJobRow.state)
            .outerjoin(
                BoundJobRow, (BoundJobRow.run_id == RunRow.id) & (BoundJobRow.attempt == RunRow.attempt)
            )
            .where(RunRow.id.in_(tokens))
            .order_by(RunRow.id)
        ).all()
        return [
            RunPoll(run, run.place, now, job is not None and job not in OVER, tokens[run.id])
            for run, job in rows
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
        # The run was deleted meanwhile, or its row is locked by a hanging process; it is polled again after the lease.
        _log.warning("run %s/%s: its poll is not recorded: %s", poll.run.project, poll.run.run, error)
        metrics.SWEEP_FAULTS.labels("run").inc()


def _poll(service: Service, poll: RunPoll) -> None:
    run, fresh, listed = poll.run, False, False
    try:
        if needs_listing(service, poll):
            listed, fresh = True, discover(service, run.id).fresh
        if run.state not in ENDED:
            advance_run(service, run.id)
        elif poll.has_job:
            record_job(service, run.id)
        if listed and _HEALTH in run.health:
            record_store_health(service, run.id, None)
    except WatchstepError as error:
        _log.warning("run %s/%s: %s", run.project, run.run, error.what)
        record_store_health(service, run.id, error)
    except SQLAlchemyError as error:
        _log.warning("run %s/%s: %s; a later sweep tries again", run.project, run.run, error)
    except Exception as error:  # noqa: BLE001 - an internal error is reported in this run's health, and affects no other run
        _log.exception("run %s/%s cannot be polled; a later sweep tries again", run.project, run.run)
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
        f"internal error of the service ({type(error).__name__})", "see the service's log; please report it"
    )


def needs_listing(service: Service, poll: RunPoll) -> bool:
    """Whether a run has been quiet long enough for a listing of its store."""
    run = poll.run
    # Ignored announcements are no news: only a listing finds their segments.
    news_ns = 0 if run.ignored_ns else run.last_seen_ns
    quiet_since = max(news_ns, run.listed_ns) if run.listed_ns else 0
    quiet = poll.now_ns - quiet_since
    if run.state in ENDED or run.state == "lost":
        # A late segment or another attempt is possible, but rare.
        return quiet >= nanoseconds(service.settings.silent_seconds)
    base = max(service.settings.listing_ns(local=poll.place.is_local), service.listing_times.pause_ns(run.id))
    return quiet >= base if poll.has_job or run.ignored_ns else quiet >= max(base, run.poll_interval_ns)


def _poll_interval(service: Service, poll: RunPoll, listed: bool, fresh: bool) -> int:
    """Time for which a run may be quiet before it is polled.

    The interval is doubled if a run announces and the listing found nothing new: the run is only slower than the
    polls. A listing that found unannounced objects resets it.
    """
    if poll.has_job:
        return _JOB_POLL_NS  # only polls detect that the job is gone
    base = service.settings.listing_ns(local=poll.place.is_local)
    announces = not poll.run.ignored_ns and poll.run.last_seen_ns > poll.run.listed_ns > 0
    before = max(base, poll.run.poll_interval_ns)
    if not listed:
        return before
    return min(2 * before, max(base, LONGEST_QUIET_NS)) if announces and not fresh else base


def _next_poll_ns(service: Service, row: RunRow, poll: RunPoll, poll_interval_ns: int) -> int:
    """Nanoseconds until the next poll."""
    if row.state in ENDED or row.state == "lost":
        silent = nanoseconds(service.settings.silent_seconds)
        # The interval grows with the time since the end, and varies so that runs that ended together are not listed together.
        since = (poll.now_ns - (row.ended_ns or poll.now_ns)) // _ENDED_SHARE
        if poll.has_job:
            silent = min(silent, _JOB_POLL_NS)  # the program may run on after its recorder has closed
        return int(min(max(silent, since), max(silent, _LONGEST_ENDED_NS)) * (0.75 + (row.id % 64) / 128))
    return poll_interval_ns


def poll_due_runs(service: Service, seconds: float) -> None:
    """Claim and execute polls in batches, until none is due or the time is over.

    A store that does not answer delays runs on other stores by `Settings.store_wait_seconds`, once until it
    answers. Its own runs wait for each other, and are claimed again later. Runs on local stores
    are polled by threads, fairly by project: a run with a slow listing delays only its own project's runs.
    """
    began = time.monotonic()
    while claimed := claim_polls(service):
        _do_portion(service, claimed)
        if time.monotonic() - began >= seconds or len(claimed) < MOST_POLLS:
            return


def _do_portion(service: Service, polls: list[RunPoll]) -> None:
    timeout = service.settings.store_wait_seconds
    local: dict[Future[None], RunPoll] = {}
    for poll in polls:
        work = functools.partial(poll_run, service, poll)
        if poll.place.is_local:
            local[service.look_threads.submit(poll.run.project, work)] = poll
        else:
            service.bulkhead.call(poll.place.registration, work, timeout, None)
    done, late = wait(local, _LOCAL_SECONDS)
    # Polls in progress continue in their threads; the others are released, behind polls that are due by then.
    _put_off(service, [local[future] for future in late if future.cancel()])
    for future in done:
        if not future.cancelled():  # cancelled when the service closes
            future.result()


def _put_off(service: Service, polls: list[RunPoll]) -> None:
    if not polls:
        return
    with service.database.once() as session:
        for poll in polls:
            POLL_LEASE.release(session, poll.run.id, poll.taken_ns, poll_ns=now_ns() + _PUT_OFF_NS)


def record_store_health(service: Service, run_id: int, error: WatchstepError | None) -> None:
    """Record a store error in a run's health, or clear it. A deleted run is skipped."""
    with service.database.write() as session:
        run = session.get(RunRow, run_id)
        if run is None:
            return
        others = {name: problem for name, problem in run.health.items() if name != _HEALTH}
        run.health = others if error is None else {**others, _HEALTH: error.what[:500]}
