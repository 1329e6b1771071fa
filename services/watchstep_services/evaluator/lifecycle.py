"""The life of a run: created → running → completed | failed | stopped | lost."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal, cast

from sqlalchemy import func, select

from watchstep_services.database.clock import read_clock
from watchstep_services.database.models import Action, Attempt, Job, Run, Segment
from watchstep_services.database.records import add_event
from watchstep_services.dispatcher.request import stop_key
from watchstep_services.estimator.backend import OVER, JobState, JobStatus
from watchstep_services.estimator.errors import BackendError
from watchstep_services.evaluator.place import Place
from watchstep_services.evaluator.rule_health import tell_silent
from watchstep_services.events import make_event
from watchstep_services.points import reach
from watchstep_services.service import Service
from watchstep_services.settings import nanoseconds
from watchstep_services.tenancy.jobs import Bound, bound_job

RunState = Literal["created", "running", "completed", "failed", "stopped", "lost"]
ENDED = ("completed", "failed", "stopped")

_log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 5.0
"""What a job that is gone has written is on its store by then."""


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
        stopped: Watchstep stopped it.
        silent_ns: how long nothing was heard.
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
    over = (complete or (gone and facts.gone_for_ns >= grace_ns)) and not facts.unread
    if over and (not facts.stopping or facts.silent_ns >= silent_ns):
        return _ending(facts)
    if facts.silent_ns >= silent_ns and not (runs or waits) and not facts.unread:
        return "lost"
    return "running" if facts.heard or runs else "created"


def _ending(facts: Facts) -> RunState:
    if facts.stopped or "stopped" in facts.ends:
        return "stopped"
    if "failed" in facts.ends:
        return "failed"
    if len(facts.ends) >= facts.world_size:
        return "completed"
    # Gone without last words of every worker: only its exit code speaks for it.
    return "completed" if facts.job is not None and facts.job.exit_code == 0 else "failed"


def advance_run(service: Service, run_id: int) -> RunState:
    """Bring a run's state up to date, with events on its start and end; returns the state."""
    with service.database.read() as session:
        run = session.get_one(Run, run_id)
        asked = run.attempt
        found = bound_job(session, run_id, asked)
    bound = None if found is None else found.row
    status = None if found is None else _job_status(service, found)
    with service.database.write() as session:
        now = read_clock(session)
        run = session.get_one(Run, run_id, with_for_update=True)
        gone_for = 0
        if bound is not None and asked == run.attempt and status is not None:
            job = session.get_one(Job, bound.id)
            job.state, job.exit_code = status.state, status.exit_code
            if status.is_over and job.gone_ns is None:
                job.gone_ns = now
                run.listed_ns = run.look_ns = (
                    0  # its last segments may not have been announced: list it at once
                )
            gone_for = now - (job.gone_ns or now)
        attempt = session.execute(
            select(Attempt).filter_by(run_id=run_id, attempt=run.attempt)
        ).scalar_one_or_none()
        unread = session.execute(
            select(func.count()).select_from(Segment).filter_by(run_id=run_id, state="announced")
        ).scalar_one()
        stop = session.execute(
            select(Action).where(Action.key == stop_key(run_id, run.attempt))
        ).scalar_one_or_none()
        # Without a job, only the workers' last words tell whether what was asked was done.
        stopped = stop is not None and stop.state == "done" and bound is not None
        facts = Facts(
            heard=attempt is not None and attempt.largest >= 0,
            world_size=max(1, attempt.world_size if attempt else 1),
            ends=tuple(str(end["state"]) for end in attempt.ends.values()) if attempt else (),
            unread=bool(unread),
            job=status,
            gone_for_ns=gone_for,
            stopping=stop is not None and stop.state == "pending",
            stopped=stopped,
            silent_ns=now - run.heard_ns,
        )
        settings = service.settings
        grace = nanoseconds(min(settings.grace_seconds, _LAST_WORDS_SECONDS))
        state = next_state(facts, grace, nanoseconds(settings.silent_seconds))
        _change(service, run, state, now, session)
        reach("lifecycle.writing", run_id)
    reach("lifecycle.written", run_id)
    return state


def _job_status(service: Service, bound: Bound) -> JobStatus:
    if bound.row.state in OVER:
        return JobStatus(cast("JobState", bound.row.state), bound.row.exit_code)
    backend = service.backend_of(bound.kind, bound.settings)
    if backend is None:
        return JobStatus("unknown")
    try:
        return service.job_looks.status(backend, bound.job)
    except BackendError as error:  # what it came to is seen once the backend answers again
        _log.warning("job %s:%s: %s", bound.job.backend, bound.job.id, error.what)
        return JobStatus("unknown", detail=error.what)


def _change(service: Service, run: Run, state: RunState, now: int, session: Any) -> None:
    before = run.state
    if state == before:
        return
    run.state = state
    run.ended_ns = now if state in ENDED or state == "lost" else None
    data = {"attempt": run.attempt, "state": state, "before": before, "last_step": run.last_step}
    named = (run.project, run.run)
    if state == "running":
        add_event(
            session, run.id, make_event("watchstep.run.started", service.base_url, named, now, data), now
        )
    elif run.ended_ns is not None:
        add_event(session, run.id, make_event("watchstep.run.ended", service.base_url, named, now, data), now)
    if state in ENDED and run.attempt:
        place = Place(service.base_url, run.id, run.project, run.run, "", run.attempt, now)
        tell_silent(session, place)
