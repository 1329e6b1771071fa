"""The graded stop: request it from all workers, then stop the job through its backend, then kill it. Each try advances one stage.

An attempt that is not the newest of its run may still run, and is then stopped, too. Which attempt is the newest follows from the
attempts' own clocks, and clocks of machines differ: a program that is restarted on another machine may appear to have begun before
the attempt that it replaces. Which attempt runs follows from when their segments were found, by the database's clock.

The stop event names the stopped job and the last checkpoint before the bad step.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Literal

from sqlalchemy import select

from watchstep.errors import WatchstepError
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.documents import last_good
from watchstep_launch.backend import JobStatus
from watchstep_services.core.due_action import AttemptResult, DueAction
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.db.clock import read_clock
from watchstep_services.db.lease import ACTION_LEASE
from watchstep_services.db.models import Attempt, EventRow
from watchstep_services.dispatch.barrier import agree, common_step, seconds_left
from watchstep_services.dispatch.target import REFUSED, StopTarget, at_store, load_target, write_control
from watchstep_services.runs import attempts
from watchstep_services.runs.discovery import discover, listing_due
from watchstep_services.runs.stops import SIGNALS_SENT, StopStage
from watchstep_services.service.context import Service
from watchstep_services.tenancy import bound_job

_AHEAD_NS = 15 * NANOSECONDS
"""If a segment of this attempt was found so much later than the newest attempt's newest segment, the newest attempt has ended."""

_SILENT_NS = 60 * NANOSECONDS
"""Time without a segment after which an attempt is over if another one runs: later segments are late uploads."""

AttemptActivity = Literal["over", "open", "running"]


def activity_of(service: Service, target: StopTarget, now_ns: int) -> AttemptActivity:
    """Whether an attempt that is not the newest is over, runs, or is undecided (``open``).

    It is over if no segment of it was found since the newest attempt began to write. It runs if the newest has ended, or has been silent
    for 15 s while this one wrote. If each has its own job, it runs while its job does, because a hanging job is silent. A pending
    stop of the newest attempt is finished first.
    """
    newest = attempts.described(service.database, target.run.id, target.run.attempt)
    own_ns = _last_seen_ns(target.attempt)
    runs = _runs_in_its_own_job(service, target)
    if target.is_over or (now_ns - own_ns >= _SILENT_NS and not runs):
        return "over"
    if newest is None:
        return "running"
    if newest.first_seen_ns > own_ns and not runs:
        return "over"
    stop = ControlDocument.from_data(target.run.control).stop
    has_ended = len(newest.ends) >= max(1, newest.world_size)
    if not has_ended and stop is not None and stop.attempt == newest.attempt:
        return "open"
    if runs:
        return "running"
    return "running" if has_ended or own_ns - _last_seen_ns(newest) >= _AHEAD_NS else "open"


def _runs_in_its_own_job(service: Service, target: StopTarget) -> bool:
    """Whether the attempt's job is not the newest attempt's job, and runs or has an unknown status.

    Restarts by a launcher share a job; ending it would end the newest attempt.
    """
    if target.job is None or not (target.is_visible or target.trouble is not None):
        return False
    with service.database.read() as session:
        newest = bound_job(session, target.run.id, target.run.attempt)
    return newest is not None and (newest.job.backend, newest.job.id) != (target.job.backend, target.job.id)


def _last_seen_ns(attempt: Attempt) -> int:
    """When the attempt's newest segment was found, by the database's clock; 0 if it has none."""
    return max((int(last_seen_ns) for _, last_seen_ns in attempt.ranks.values()), default=0)


_log = logging.getLogger(__name__)


def stop_facts(service: Service, due: DueAction, target: StopTarget) -> dict[str, Any]:
    """The ``job``, the bad ``step`` and ``tensor`` if an alert requested the stop, and the ``last_good_checkpoint`` or None."""
    finding = _finding(service, due)
    facts: dict[str, Any] = {
        name: finding[name] for name in ("step", "tensor") if finding.get(name) is not None
    }
    if target.job is not None:
        facts["job"] = f"{target.job.backend}:{target.job.id}"
    try:
        checkpoint = at_store(service, target, lambda run_store: last_good(run_store, facts.get("step")))
    except REFUSED as error:
        _log.warning(
            "run %s/%s: its checkpoints cannot be read: %s", target.run.project, target.run.run, error.what
        )
        checkpoint = None
    return {**facts, "last_good_checkpoint": None if checkpoint is None else checkpoint.as_data()}


def _finding(service: Service, due: DueAction) -> dict[str, Any]:
    """The finding of the alert that requested the stop; empty for other requests."""
    cause = str(due.payload["cause"])
    with service.database.read() as session:
        event = session.execute(
            select(EventRow.event).filter_by(run_id=due.run_id, id=cause)
        ).scalar_one_or_none()
    finding = {} if event is None else event["data"].get("finding")
    return dict(finding) if isinstance(finding, dict) else {}


_HOW: dict[int, str] = {
    StopStage.PENDING: "already ended",
    StopStage.REQUESTED: "cooperative",
    StopStage.TERMINATED: "terminated",
    StopStage.KILLED: "killed",
}
_POLL_NS = NANOSECONDS // 5
_ENDS_NS = NANOSECONDS
"""Shortest interval of listings that look for end documents."""
_LONGEST_POLL_NS = 5 * NANOSECONDS
_KILL_TIMEOUT_NS = 30 * NANOSECONDS


def try_stop(service: Service, due: DueAction) -> AttemptResult:
    """Advance a stop by one stage, or detect that it is over.

    The workers are requested to stop even if the job's backend does not answer, after a few seconds at most, and the backend
    even if the store does not answer.

    Raises:
        StoreError, ConfigError: the store does not answer and the job's status is unknown, or the job's identity cannot be used.
        BackendError: the backend does not answer, and nothing else can be done now.
    """
    target = load_target(
        service, due.run_id, str(due.payload["attempt"]), hurried=due.stage == StopStage.PENDING
    )
    if due.stage == StopStage.PENDING:
        return _request(service, due, target)
    if target.trouble is not None and due.stage != StopStage.REQUESTED:
        raise target.trouble
    if not target.is_visible:
        return _await_ends(service, due, target)
    if target.is_over:
        return _over_since(service, due, target)
    if due.stage in SIGNALS_SENT:
        # The process that was to send the signal died before it recorded that it did. The job exists, so it is sent again.
        return _signal(service, due, target, SIGNALS_SENT[due.stage])
    store_error: WatchstepError | None = None
    try:
        agreed = agree(service, due, target) if due.stage == StopStage.REQUESTED else None
    except REFUSED as error:
        agreed, store_error = None, error
    if agreed == "refused":
        return _signal(service, due, target, StopStage.TERMINATED)
    if agreed is not None:
        return agreed
    waited = due.now_ns - due.stage_since_ns
    if due.stage == StopStage.KILLED:
        if waited > _KILL_TIMEOUT_NS:
            return AttemptResult(
                "failed",
                f"job {_named(target)} still exists {waited // NANOSECONDS} s after SIGKILL",
                StopStage.KILLED,
            )
        return _poll_again(due)
    grace = service.settings.grace_seconds + (
        seconds_left(service, target) if due.stage == StopStage.REQUESTED else 0.0
    )
    if waited < nanoseconds(grace):
        return _poll_again(due)
    return _with_store_error(store_error, _signal(service, due, target, due.stage + 1))


def _poll_again(due: DueAction, after_ns: int | None = None) -> AttemptResult:
    """Poll again, with an interval that grows with the age of the stage."""
    return AttemptResult(
        "waiting", "", due.stage, due.now_ns + (_poll_interval_ns(due) if after_ns is None else after_ns)
    )


def _poll_interval_ns(due: DueAction) -> int:
    return min(_LONGEST_POLL_NS, max(_POLL_NS, (due.now_ns - due.stage_since_ns) // 4))


def _request(service: Service, due: DueAction, target: StopTarget) -> AttemptResult:
    attempt = target.attempt.attempt
    if target.run.attempt != attempt:
        activity = activity_of(service, target, due.now_ns)
        if activity == "over":
            return AttemptResult("skipped", f"attempt {attempt} is over: {target.run.attempt} runs now")
        if activity == "open":
            return _poll_again(due)
    if target.is_over:
        return _over(service, due, target, StopStage.PENDING)
    step = common_step(service, target)
    reason, cause = str(due.payload["reason"]), str(due.payload["cause"])
    stop = StopRequest(attempt, step, reason, cause, agreed=target.is_alone)
    try:
        control = write_control(service, target, stop)
    except REFUSED as error:
        if target.hurried:
            target = load_target(service, due.run_id, attempt)
            if target.is_over:
                return _over(service, due, target, StopStage.REQUESTED)
        if not target.is_visible:
            raise  # there is no other way to stop the job now
        return _continue_without_store(service, due, target, error)
    if target.listens:
        assert control.stop is not None
        return AttemptResult(
            "advanced",
            f"asked all workers to stop at step {control.stop.step}",
            StopStage.REQUESTED,
            due.now_ns + _POLL_NS,
        )
    if target.is_visible:
        return _signal(service, due, target, StopStage.TERMINATED)
    if target.status is not None:
        return _not_visible(target)
    facts = {"how": "requested", "stopped_at_step": None}
    return AttemptResult(
        "done",
        "no job bound: requested from the workers; the program ignores stop requests",
        StopStage.UNCONFIRMED,
        facts=facts,
    )


def _continue_without_store(
    service: Service, due: DueAction, target: StopTarget, refused: WatchstepError
) -> AttemptResult:
    """Continue if the store refused: workers read the request in answers to announcements, and the job's grace time has begun."""
    grace_is_over = due.tries > 0 and due.now_ns - due.stage_since_ns >= nanoseconds(
        service.settings.grace_seconds
    )
    if not target.listens or grace_is_over:
        return _with_store_error(refused, _signal(service, due, target, StopStage.TERMINATED))
    detail = (
        f"{refused.what}; the workers receive the request only in answers to their announcements, and job {_named(target)}"
        f" is stopped after {service.settings.grace_seconds:g} s ({refused.hint})"
    )
    return AttemptResult("error", detail, StopStage.REQUESTED, due.now_ns + _POLL_NS)


def _with_store_error(refused: WatchstepError | None, result: AttemptResult) -> AttemptResult:
    """The result, with the store's error that led to it in its detail."""
    return result if refused is None else replace(result, detail=f"{refused.what}; {result.detail}")


def _await_ends(service: Service, due: DueAction, target: StopTarget) -> AttemptResult:
    """Poll a stop without a visible job: only the workers' end documents show that it is over."""
    if target.ends_complete:
        return _over(service, due, target, StopStage.REQUESTED)
    agreed = agree(service, due, target)
    if agreed is not None and agreed != "refused":
        return agreed
    if due.now_ns - due.stage_since_ns > nanoseconds(service.settings.silent_seconds):
        if target.status is not None:
            return _not_visible(target)
        facts = {"how": "requested", "stopped_at_step": None}
        return AttemptResult(
            "done",
            "no job bound: requested from the workers; they did not confirm",
            StopStage.UNCONFIRMED,
            facts=facts,
        )
    look = listing_due(service, target.place, due.run_id, target.run.listed_ns, due.now_ns)
    if look and at_store(service, target, lambda _: discover(service, due.run_id)).fresh:
        return _poll_again(due, 0)
    # Several workers have to agree, so their answers are polled more often.
    return _poll_again(due, max(_ENDS_NS, _poll_interval_ns(due)) if target.is_alone else None)


def _not_visible(target: StopTarget) -> AttemptResult:
    """The result for a job that is not visible from this process, now or permanently.

    Raises:
        BackendError: it is not visible now.
    """
    if target.trouble is not None:
        raise target.trouble
    detail = target.status.detail if target.status is not None else ""
    return AttemptResult(
        "failed", f"job {_named(target)} cannot be stopped from here: {detail}", StopStage.REQUESTED
    )


def _signal(service: Service, due: DueAction, target: StopTarget, stage: int) -> AttemptResult:
    """Signal a job. The intention is committed first, so that a job that is then found gone counts as stopped by the signal."""
    assert target.job is not None
    assert target.backend is not None
    if not _intend(
        service, due, StopStage.TERMINATING if stage == StopStage.TERMINATED else StopStage.KILLING
    ):
        return AttemptResult(
            "waiting", "", due.stage
        )  # another worker has claimed the action: nothing of this try is recorded
    failpoint("stop.signalling", due)
    after: JobStatus = (
        target.backend.stop(target.job) if stage == StopStage.TERMINATED else target.backend.kill(target.job)
    )
    failpoint("stop.signalled", due)
    if after.is_over:
        return _over(service, due, target, stage)
    verb = "asked to end (SIGTERM)" if stage == StopStage.TERMINATED else "killed (SIGKILL)"
    return AttemptResult("advanced", f"job {_named(target)} {verb}", stage, due.now_ns + _POLL_NS)


def _intend(service: Service, due: DueAction, stage: int) -> bool:
    """Commit that a signal is to be sent; False if another worker has claimed the action."""
    if due.stage == stage:
        return True
    with service.database.write() as session:
        row = ACTION_LEASE.lock(session, due.id, due.claims)
        if row is None or row.state != "pending":
            return False
        row.stage, row.stage_since_ns = int(stage), read_clock(session)
    return True


def _over_since(service: Service, due: DueAction, target: StopTarget) -> AttemptResult:
    """The result of a stop with a job that was found gone: stopped by the signal, if it may have been sent."""
    if due.stage not in SIGNALS_SENT:
        return _over(service, due, target, due.stage)
    # The signal may not have been sent; if the program trained to its end, the signal did not end it.
    return _over(
        service, due, target, StopStage.REQUESTED if target.ended_by_itself else SIGNALS_SENT[due.stage]
    )


def _over(service: Service, due: DueAction, target: StopTarget, stage: int) -> AttemptResult:
    """The result of a stop with a job that is gone, or with ended workers.

    Args:
        service: the service.
        due: the stop.
        target: its target.
        stage: the stage that ended it.
    """
    try:
        # End documents state the steps at which the workers stopped.
        at_store(service, target, lambda _: discover(service, due.run_id))
        target = load_target(service, due.run_id, target.attempt.attempt, hurried=target.hurried)
    except REFUSED as error:
        _log.warning("run %s/%s: %s", target.run.project, target.run.run, error.what)
    steps = [int(end["last_step"]) for end in target.attempt.ends.values()]
    facts = {
        "how": _HOW[stage],
        "stopped_at_step": max([target.attempt.largest, *steps]),
        **stop_facts(service, due, target),
    }
    named = f"job {_named(target)}" if target.job is not None else "every worker"
    if stage == StopStage.PENDING:
        return AttemptResult("skipped", f"{named} had ended already", facts=facts)
    if stage == StopStage.REQUESTED and not target.applied:
        if target.ended_by_itself:
            detail = f"{named} ended by itself; the stop request had no effect on it"
        elif target.failed_by_itself:
            detail = f"{named} failed by itself, after the stop was requested and before it stopped"
        else:
            detail = f"{named} is gone; no worker reported that it stopped on request"
        return AttemptResult("done", detail, stage, facts={**facts, "how": "requested"})
    return AttemptResult("done", f"{named} is gone ({_HOW[stage]})", stage, facts=facts)


def _named(target: StopTarget) -> str:
    return f"{target.job.backend}:{target.job.id}" if target.job is not None else "none"
