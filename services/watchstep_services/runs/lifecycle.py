"""The lifecycle of a run: created → running → completed | failed | stopped | lost."""

from __future__ import annotations

import functools
import logging
import signal
from concurrent.futures import CancelledError, wait
from dataclasses import dataclass
from typing import Any, Literal, cast

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from watchstep.stopping import EXIT_STOPPED
from watchstep_launch.backend import OVER, BackendError, JobState, JobStatus
from watchstep_services.core.events import make_event
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import ActionRow, Attempt, BoundJobRow, RunRow, Segment
from watchstep_services.db.records import add_event
from watchstep_services.runs.claim import EventContext
from watchstep_services.runs.discovery import UNLISTED
from watchstep_services.runs.rule_health import report_silent_rules
from watchstep_services.runs.stops import StopStage, stop_key
from watchstep_services.service.context import Service
from watchstep_services.tenancy import BoundJob, bound_job, launch_of

RunState = Literal["created", "running", "completed", "failed", "stopped", "lost"]
ENDED = ("completed", "failed", "stopped")

_log = logging.getLogger(__name__)

_STATUS_SECONDS = 3.0
"""Timeout of an evaluation's request to a job's backend. Slurm's controller answers within a second unless it is overloaded."""

_END_DOCUMENTS_SECONDS = 5.0
"""Time after which the end documents of a job that is gone are on its store."""


_SIGNALLED = frozenset(
    code for number in (signal.SIGTERM, signal.SIGKILL) for code in (-number, 128 + number)
)
"""Exit codes of a job that SIGTERM or SIGKILL ended, as the system and as shells and containers report them."""


@dataclass(frozen=True)
class Facts:
    """Facts about an attempt of a run, usually the newest.

    Attributes:
        has_rows: a segment of it was read.
        world_size: expected workers, at least 1.
        ends: states of the workers with an end document.
        unread: segments wait to be read.
        job: status of the bound job; None without a job.
        gone_for_ns: how long the job has been gone.
        stopping: a stop is in progress; its result is waited for, so that the run does not end twice.
        stopped: Watchstep had its job ended. If it was only requested to stop, its end documents and its exit code decide.
        silent_ns: time since the last sign of the attempt.
        before: the state in which it ended before; None while it runs, or is lost.
    """

    has_rows: bool
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
    """The state of a run.

    Args:
        facts: facts about its newest attempt.
        grace_ns: how long the end documents of a job that is gone are waited for.
        silent_ns: time without a sign, and without a running or queued job, after which a run is lost.
    """
    gone = facts.job is not None and facts.job.is_over
    runs = facts.job is not None and facts.job.state == "running"
    waits = facts.job is not None and facts.job.state == "queued"
    complete = len(facts.ends) >= facts.world_size
    settled = complete or gone
    # The process that wrote the last end document may still be exiting, so its exit code is waited for.
    complete = complete and not (runs and facts.silent_ns < grace_ns)
    over = (complete or (gone and facts.gone_for_ns >= grace_ns)) and not facts.unread
    if over and (not facts.stopping or facts.silent_ns >= silent_ns):
        return _ending(facts)
    if facts.before is not None and settled:
        return facts.before  # a late segment or stop does not restart it
    if facts.silent_ns >= silent_ns and not (runs or waits) and not facts.unread:
        return "lost"
    return "running" if facts.has_rows or runs else "created"


def _ending(facts: Facts) -> RunState:
    if facts.stopped or "stopped" in facts.ends:
        return "stopped"
    if "failed" in facts.ends:
        return "failed"
    code = None if facts.job is None else facts.job.exit_code
    if len(facts.ends) >= facts.world_size:
        # A closed hook says nothing about what the program did afterwards, for example sys.exit(1).
        return "completed" if code in (None, 0, EXIT_STOPPED) else "failed"
    # The job is gone and end documents are missing, so its exit code decides.
    return "stopped" if code == EXIT_STOPPED else "completed" if code == 0 else "failed"


def advance_run(service: Service, run_id: int) -> RunState:
    """Update a run's state, with events on its start and end; return the state."""
    with service.database.read() as session:
        run = session.get_one(RunRow, run_id)
        polled_attempt = run.attempt
        bound = bound_job(session, run_id, polled_attempt)
    bound_row = None if bound is None else bound.row
    status = None if bound is None else _job_status(service, run.project, bound)
    with service.database.write() as session:
        now = read_clock(session)
        run = session.get_one(RunRow, run_id, with_for_update=True)
        gone_for = 0
        if bound_row is not None and polled_attempt == run.attempt and status is not None:
            gone_for = _record_status(session, run, bound_row.id, status, now)
        _end_replaced(service, session, run, now)
        state = _state_of(service, session, run, status, gone_for, now)
        _change(service, run, state, now, session)
        failpoint("lifecycle.writing", run_id)
    failpoint("lifecycle.written", run_id)
    return state


def record_job(service: Service, run_id: int) -> None:
    """Record the state of the job of a run that has ended. The program may run on after its recorder has closed."""
    with service.database.read() as session:
        run = session.get_one(RunRow, run_id)
        bound = bound_job(session, run_id, run.attempt)
    if bound is None:
        return
    status = _job_status(service, run.project, bound)
    with service.database.write() as session:
        run = session.get_one(RunRow, run_id, with_for_update=True)
        _record_status(session, run, bound.row.id, status, read_clock(session))


def _record_status(session: Session, run: RunRow, job_id: int, status: JobStatus, now: int) -> int:
    """Record the status of a run's job. Returns how long the job has been gone, in nanoseconds."""
    job = session.get_one(BoundJobRow, job_id)
    job.state, job.exit_code = status.state, status.exit_code
    if status.is_over and job.gone_ns is None:
        job.gone_ns = now
        run.listed_ns = run.poll_ns = (
            0  # its last segments may not have been announced, so the store is listed at once
        )
    return now - (job.gone_ns or now)


def start_run(service: Service, session: Session, run_id: int, now: int) -> None:
    """Publish a run's start in the transaction of an evaluation, before the events of its rules.

    A run with rows that does not run yet runs from now on. All other changes are made by `advance_run`, which requests the status from the
    job's backend; here the last known status is used.

    Args:
        service: the service.
        session: the evaluation's transaction, which has locked the run's row and written the progress of its attempt.
        run_id: id of the run.
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
    """Publish the end of the attempt that ran, if an attempt of another launch replaced it before its end was published.

    A restart inside one launch (``a1`` and ``a1-r1``) does not end the launch, so nothing is published.
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
    add_event(session, run.id, make_event("io.watchstep.run.ended", service.base_url, named, now, data), now)
    run.state, run.ended_ns = "created", None


def _status_of(bound: BoundJob | None) -> JobStatus | None:
    """The last known status of an attempt's job; None without a job."""
    return None if bound is None else JobStatus(cast("JobState", bound.row.state), bound.row.exit_code)


def _state_of(
    service: Service, session: Session, run: RunRow, status: JobStatus | None, gone_for: int, now: int
) -> RunState:
    """The state of a run from the database and its job's status."""
    facts = _facts_of(session, (run, run.attempt), status, gone_for, now)
    settings = service.settings
    grace = nanoseconds(min(settings.grace_seconds, _END_DOCUMENTS_SECONDS))
    return next_state(facts, grace, nanoseconds(settings.silent_seconds))


def _facts_of(
    session: Session, of: tuple[RunRow, str], status: JobStatus | None, gone_for: int, now: int
) -> Facts:
    """The facts about an attempt of a run from the database and its job's status."""
    run, name = of
    attempt = session.execute(select(Attempt).filter_by(run_id=run.id, attempt=name)).scalar_one_or_none()
    unread = session.execute(
        select(func.count()).select_from(Segment).filter_by(run_id=run.id, state="announced")
    ).scalar_one()
    stop = session.execute(
        select(ActionRow).where(ActionRow.key == stop_key(run.id, name))
    ).scalar_one_or_none()
    return Facts(
        has_rows=attempt is not None and attempt.largest >= 0,
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
    """Whether a finished stop ended the job, and the job did not end by itself meanwhile.

    If the service died between the signal and the commit of the stage, the signal is the only evidence.
    """
    by_signal = status is not None and status.exit_code in _SIGNALLED
    return stop.stage in (StopStage.TERMINATED, StopStage.KILLED) or by_signal


def _job_status(service: Service, project: str, bound: BoundJob) -> JobStatus:
    """The status of a job. A slow backend is not waited for, because it would delay this evaluation and those behind it."""
    if bound.row.state in OVER:
        return JobStatus(cast("JobState", bound.row.state), bound.row.exit_code)
    backend = service.backend_of(bound.kind, bound.settings)
    if backend is None:
        return JobStatus("unknown")
    if service.job_polling.is_silent(project, bound.job.backend):
        # An earlier request may have been answered since, in a thread.
        recent = service.job_polling.recent(bound.job)
        return recent or JobStatus("unknown", detail=f"backend {bound.job.backend}: does not answer")
    request = functools.partial(service.job_polling.status, backend, bound.job)
    try:
        if not backend.poll_seconds:  # a process of this machine
            return request()
        future = service.status_threads.submit(project, request, bound.job.backend)
        if wait([future], _STATUS_SECONDS).done:
            return future.result()
        future.cancel()
        service.job_polling.note_silence(project, bound.job.backend)
        detail = f"backend {bound.job.backend}: no answer for {_STATUS_SECONDS:g} s; it is asked again later"
        _log.warning("job %s:%s: %s", bound.job.backend, bound.job.id, detail)
        return JobStatus("unknown", detail=detail)
    except CancelledError:
        return JobStatus("unknown", detail="the service is ending")
    except BackendError as error:  # the job's state is read once the backend answers again
        _log.warning("job %s:%s: %s", bound.job.backend, bound.job.id, error.what)
        return JobStatus("unknown", detail=error.what)


QUIET_NS = 30 * NANOSECONDS
"""Time after which a run in progress is shown as one from which nothing was evaluated."""


def quiet_since(run: RunRow, now: int) -> int | None:
    """Since when nothing of a run in progress was evaluated; None if that is less than `QUIET_NS`, or the run is over.

    It is counted from the run's last registration, so that a restart is not quiet for as long as its run was over.
    """
    since = max(run.registered_ns, run.evaluated_ns)
    return since if run.ended_ns is None and now - since >= QUIET_NS else None


def health_of(run: RunRow, now: int) -> dict[str, Any]:
    """The health of a run, with a problem if nothing of a run in progress was evaluated since it was registered."""
    if quiet_since(run, now) is None or run.evaluated_ns > run.registered_ns:
        return run.health
    problem = (
        f"nothing of the run has been evaluated since it was registered; it is read from {run.place.location}"
    )
    return {**run.health, "not_evaluated": problem}


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
        # The poll of an ended run is put off by minutes or hours.
        run.poll_ns = 0
        add_event(
            session, run.id, make_event("io.watchstep.run.started", service.base_url, named, now, data), now
        )
    elif run.ended_ns is not None:
        add_event(
            session, run.id, make_event("io.watchstep.run.ended", service.base_url, named, now, data), now
        )
    if state in ENDED and run.attempt:
        context = EventContext(service.base_url, run.id, run.project, run.run, "", run.attempt, now)
        report_silent_rules(session, context)
