"""The life of a run: created → running → completed | failed | stopped | lost."""

from __future__ import annotations

import functools
import logging
import signal
from concurrent.futures import CancelledError, wait
from dataclasses import dataclass
from typing import Literal, cast

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from watchstep.stopping import EXIT_STOPPED
from watchstep_launch.backend import OVER, BackendError, JobState, JobStatus
from watchstep_services.core.events import make_event
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import nanoseconds
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import ActionRow, Attempt, BoundJobRow, RunRow, Segment
from watchstep_services.db.records import add_event
from watchstep_services.runs.claim import EventContext
from watchstep_services.runs.discovery import UNLISTED
from watchstep_services.runs.rule_health import report_silent_rules
from watchstep_services.runs.stops import KILLED, TERMINATED, stop_key
from watchstep_services.service.context import Service
from watchstep_services.tenancy.backends import BoundJob, bound_job, launch_of

RunState = Literal["created", "running", "completed", "failed", "stopped", "lost"]
ENDED = ("completed", "failed", "stopped")

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 3.0
"""So long an evaluation waits for a job's backend. Slurm's controller answers within a second unless it is overloaded."""

_LAST_WORDS_SECONDS = 5.0
"""What a job that is gone has written is on its store by then."""


_SIGNALLED = frozenset(
    code for number in (signal.SIGTERM, signal.SIGKILL) for code in (-number, 128 + number)
)
"""Exit codes of a job that SIGTERM or SIGKILL ended, as the system and as shells and containers report them."""


@dataclass(frozen=True)
class Facts:
    """What is known of a run's newest attempt.

    Attributes:
        heard: a segment of it was read.
        world_size: workers to expect, at least 1.
        ends: states of the workers that said how they ended.
        unread: segments that wait to be read.
        job: how the bound job is; None without one.
        gone_for_ns: how long the job has been gone.
        stopping: a stop is on its way; what it comes to is waited for, lest the run end twice.
        stopped: Watchstep had its job ended. Of one that was only asked to stop, its workers and its exit code tell what it did.
        silent_ns: how long nothing was heard.
        before: the state in which it has ended already; None while it goes on, or is lost.
    """

    heard: bool
    world_size: int
    ends: tuple[str, ...]
    unread: bool
    job: JobStatus | None
    gone_for_ns: int
    stopping: bool
    stopped: bool
    silent_ns: int
    before: RunState | None = None


def next_state(facts: Facts, grace_ns: int, silent_ns: int) -> RunState:
    """Where a run stands.

    Args:
        facts: what is known.
        grace_ns: how long the last words of a job that is gone are waited for.
        silent_ns: after so long without a sign, and without a job that runs or waits for its turn, a run is lost.
    """
    gone = facts.job is not None and facts.job.is_over
    runs = facts.job is not None and facts.job.state == "running"
    waits = facts.job is not None and facts.job.state == "queued"
    complete = len(facts.ends) >= facts.world_size
    settled = complete or gone
    # The process that wrote the last end document may still be ending: its exit code is waited for.
    complete = complete and not (runs and facts.silent_ns < grace_ns)
    over = (complete or (gone and facts.gone_for_ns >= grace_ns)) and not facts.unread
    if over and (not facts.stopping or facts.silent_ns >= silent_ns):
        return _ending(facts)
    if facts.before is not None and settled:
        return facts.before  # a segment or a stop that comes late does not begin it anew
    if facts.silent_ns >= silent_ns and not (runs or waits) and not facts.unread:
        return "lost"
    return "running" if facts.heard or runs else "created"


def _ending(facts: Facts) -> RunState:
    if facts.stopped or "stopped" in facts.ends:
        return "stopped"
    if "failed" in facts.ends:
        return "failed"
    code = None if facts.job is None else facts.job.exit_code
    if len(facts.ends) >= facts.world_size:
        # A hook that was closed in good order says nothing of what the program did afterwards: sys.exit(1), say.
        return "completed" if code in (None, 0, EXIT_STOPPED) else "failed"
    # Gone without last words of every worker: only its exit code speaks for it.
    return "stopped" if code == EXIT_STOPPED else "completed" if code == 0 else "failed"


def advance_run(service: Service, run_id: int) -> RunState:
    """Bring a run's state up to date, with events on its start and end; returns the state."""
    with service.database.read() as session:
        run = session.get_one(RunRow, run_id)
        asked = run.attempt
        found = bound_job(session, run_id, asked)
    bound = None if found is None else found.row
    status = None if found is None else _job_status(service, run.project, found)
    with service.database.write() as session:
        now = read_clock(session)
        run = session.get_one(RunRow, run_id, with_for_update=True)
        gone_for = 0
        if bound is not None and asked == run.attempt and status is not None:
            job = session.get_one(BoundJobRow, bound.id)
            job.state, job.exit_code = status.state, status.exit_code
            if status.is_over and job.gone_ns is None:
                job.gone_ns = now
                run.listed_ns = run.poll_ns = (
                    0  # its last segments may not have been announced: list it at once
                )
            gone_for = now - (job.gone_ns or now)
        _end_replaced(service, session, run, now)
        state = _state_of(service, session, run, status, gone_for, now)
        _change(service, run, state, now, session)
        failpoint("lifecycle.writing", run_id)
    failpoint("lifecycle.written", run_id)
    return state


def start_run(service: Service, session: Session, run_id: int, now: int) -> None:
    """Publish a run's start in the transaction of an evaluation, before the events of what its rules saw.

    A run that is heard of and does not run yet, does so from now on. Every other change is `advance_run`'s, which asks the job's
    backend; here the job counts as it was last seen.

    Args:
        service: the service.
        session: the evaluation's transaction, in which the run's row is locked and what was read of its attempt is written.
        run_id: the run.
        now: the database's time, in nanoseconds.
    """
    run = session.get_one(RunRow, run_id)
    _end_replaced(service, session, run, now)
    bound = bound_job(session, run_id, run.attempt)
    status, gone_for = _status_of(bound), 0
    if bound is not None:
        gone_for = now - (bound.row.gone_ns or now)
    state = _state_of(service, session, run, status, gone_for, now)
    if state == "running":
        _change(service, run, state, now, session)


def _end_replaced(service: Service, session: Session, run: RunRow, now: int) -> None:
    """Publish the end of the attempt that ran, where an attempt of another launch has replaced it before its end was published.

    A restart inside one launch (``a1`` and ``a1-r1``) is no end of the launch, and nothing is published.
    """
    replaced = run.state_attempt
    if run.state != "running" or not replaced or launch_of(replaced) == launch_of(run.attempt):
        return
    facts = _facts_of(session, (run, replaced), _status_of(bound_job(session, run.id, replaced)), 0, now)
    gone = facts.job is not None and facts.job.is_over
    if not (gone or facts.stopped or len(facts.ends) >= facts.world_size):
        return
    data = {"attempt": replaced, "state": _ending(facts), "before": run.state, "last_step": run.last_step}
    named = (run.project, run.run)
    add_event(session, run.id, make_event("watchstep.run.ended", service.base_url, named, now, data), now)
    run.state, run.ended_ns = "created", None


def _status_of(bound: BoundJob | None) -> JobStatus | None:
    """How an attempt's job was when it was last looked at; None without one."""
    return None if bound is None else JobStatus(cast("JobState", bound.row.state), bound.row.exit_code)


def _state_of(
    service: Service, session: Session, run: RunRow, status: JobStatus | None, gone_for: int, now: int
) -> RunState:
    """Where a run stands by what the database says, and a job's status."""
    facts = _facts_of(session, (run, run.attempt), status, gone_for, now)
    settings = service.settings
    grace = nanoseconds(min(settings.grace_seconds, _LAST_WORDS_SECONDS))
    return next_state(facts, grace, nanoseconds(settings.silent_seconds))


def _facts_of(
    session: Session, of: tuple[RunRow, str], status: JobStatus | None, gone_for: int, now: int
) -> Facts:
    """What the database says of an attempt of a run, with its job's status."""
    run, name = of
    attempt = session.execute(select(Attempt).filter_by(run_id=run.id, attempt=name)).scalar_one_or_none()
    unread = session.execute(
        select(func.count()).select_from(Segment).filter_by(run_id=run.id, state="announced")
    ).scalar_one()
    stop = session.execute(
        select(ActionRow).where(ActionRow.key == stop_key(run.id, name))
    ).scalar_one_or_none()
    return Facts(
        heard=attempt is not None and attempt.largest >= 0,
        world_size=max(1, attempt.world_size if attempt else 1),
        ends=tuple(str(end["state"]) for end in attempt.ends.values()) if attempt else (),
        unread=bool(unread or run.health.get(UNLISTED)),
        job=status,
        gone_for_ns=gone_for,
        stopping=stop is not None and stop.state == "pending",
        stopped=stop is not None and stop.state == "done" and _ended_job(stop, status),
        silent_ns=now - run.last_seen_ns,
        before=cast("RunState", run.state) if run.state in ENDED and run.state_attempt == name else None,
    )


def _ended_job(stop: ActionRow, status: JobStatus | None) -> bool:
    """Whether a stop that is done ended the job, and the job did not end by itself meanwhile.

    A service that dies between its signal and the commit of the stage leaves the signal as the only evidence.
    """
    by_signal = status is not None and status.exit_code in _SIGNALLED
    return stop.stage in (TERMINATED, KILLED) or by_signal


def _job_status(service: Service, project: str, bound: BoundJob) -> JobStatus:
    """How a job is. A backend that takes long is not waited for: an evaluation waits here, and others behind it."""
    if bound.row.state in OVER:
        return JobStatus(cast("JobState", bound.row.state), bound.row.exit_code)
    backend = service.backend_of(bound.kind, bound.settings)
    if backend is None:
        return JobStatus("unknown")
    if service.job_looks.is_silent(project, bound.job.backend):
        # What it was asked before may have been answered since, in a thread.
        recent = service.job_looks.recent(bound.job)
        return recent or JobStatus("unknown", detail=f"backend {bound.job.backend}: does not answer")
    look = functools.partial(service.job_looks.status, backend, bound.job)
    try:
        if not backend.poll_seconds:  # of this machine
            return look()
        asked = service.status_threads.submit(project, look, bound.job.backend)
        if wait([asked], _LOOK_SECONDS).done:
            return asked.result()
        asked.cancel()
        service.job_looks.note_silence(project, bound.job.backend)
        detail = f"backend {bound.job.backend}: no answer for {_LOOK_SECONDS:g} s; it is asked again later"
        _log.warning("job %s:%s: %s", bound.job.backend, bound.job.id, detail)
        return JobStatus("unknown", detail=detail)
    except CancelledError:
        return JobStatus("unknown", detail="the service is ending")
    except BackendError as error:  # what it came to is seen once the backend answers again
        _log.warning("job %s:%s: %s", bound.job.backend, bound.job.id, error.what)
        return JobStatus("unknown", detail=error.what)


def _change(service: Service, run: RunRow, state: RunState, now: int, session: Session) -> None:
    before = run.state
    if state == before:
        return
    run.state = state
    run.ended_ns = now if state in ENDED or state == "lost" else None
    data = {"attempt": run.attempt, "state": state, "before": before, "last_step": run.last_step}
    named = (run.project, run.run)
    if state in ("running", *ENDED):
        run.state_attempt = run.attempt
    if state == "running":
        # A look at a run that was over put the next one off by minutes or hours.
        run.poll_ns = 0
        add_event(
            session, run.id, make_event("watchstep.run.started", service.base_url, named, now, data), now
        )
    elif run.ended_ns is not None:
        add_event(session, run.id, make_event("watchstep.run.ended", service.base_url, named, now, data), now)
    if state in ENDED and run.attempt:
        place = EventContext(service.base_url, run.id, run.project, run.run, "", run.attempt, now)
        report_silent_rules(session, place)
