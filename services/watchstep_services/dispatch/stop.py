"""The graded stop: ask all workers, then stop through the backend, then kill. One stage a try, until it is over.

An attempt that is not the newest of its run may still be going on, and is then stopped too. Which attempt is the newest
follows from their own clocks, and clocks of machines differ: a program that is restarted on another machine may seem to have
begun before the attempt that it replaces. What was found of each lately, by the database's clock, shows which one goes on.

The stop event names the job that was stopped and the last checkpoint before the bad step.
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
from watchstep_services.runs.stops import (
    ASK,
    ASKED,
    INTENDED,
    KILLED,
    KILLING,
    TERMINATED,
    TERMINATING,
    UNCONFIRMED,
)
from watchstep_services.service.context import Service
from watchstep_services.tenancy.backends import bound_job

_AHEAD_NS = 15 * NANOSECONDS
"""So much later than the newest attempt's newest segment one of this attempt was found: the newest attempt has ceased."""

_SILENT_NS = 60 * NANOSECONDS
"""After so long without a segment, with another attempt running, an attempt is over: what remained of it was uploaded late."""

AttemptActivity = Literal["over", "open", "goes_on"]


def activity_of(service: Service, target: StopTarget, now_ns: int) -> AttemptActivity:
    """Whether an attempt that is not the newest is over, goes on, or nobody can tell yet.

    It is over where nothing was found of it since the newest began to write. It goes on where the newest has ended, or has been silent for
    15 s while this one wrote. Where each has a job of its own, it goes on while its job does: one that hangs is silent. Where the newest is
    asked to stop already, that goes first.
    """
    newest = attempts.described(service.database, target.run.id, target.run.attempt)
    own_ns = _last_heard_ns(target.attempt)
    runs = _runs_in_its_own_job(service, target)
    if target.is_over or (now_ns - own_ns >= _SILENT_NS and not runs):
        return "over"
    if newest is None:
        return "goes_on"
    if newest.first_seen_ns > own_ns and not runs:
        return "over"
    stop = ControlDocument.from_data(target.run.control).stop
    has_ended = len(newest.ends) >= max(1, newest.world_size)
    if not has_ended and stop is not None and stop.attempt == newest.attempt:
        return "open"
    if runs:
        return "goes_on"
    return "goes_on" if has_ended or own_ns - _last_heard_ns(newest) >= _AHEAD_NS else "open"


def _runs_in_its_own_job(service: Service, target: StopTarget) -> bool:
    """Whether its job is another than that of the newest attempt, and is seen to run or cannot be seen now.

    Restarts by a launcher share a job: to end it would end the newest attempt.
    """
    if target.job is None or not (target.in_sight or target.trouble is not None):
        return False
    with service.database.read() as session:
        newest = bound_job(session, target.run.id, target.run.attempt)
    return newest is not None and (newest.job.backend, newest.job.id) != (target.job.backend, target.job.id)


def _last_heard_ns(attempt: Attempt) -> int:
    """When its newest segment was found, by the database's clock; 0 where there is none."""
    return max((int(last_seen_ns) for _, last_seen_ns, _ in attempt.writers.values()), default=0)


_log = logging.getLogger(__name__)


def told(service: Service, due: DueAction, target: StopTarget) -> dict[str, Any]:
    """``job``, the ``step`` and ``tensor`` that were bad, where an alert asked, and the ``last_good_checkpoint``, or None."""
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
            "run %s/%s: its checkpoints are not known: %s", target.run.project, target.run.run, error.what
        )
        checkpoint = None
    return {**facts, "last_good_checkpoint": None if checkpoint is None else checkpoint.as_data()}


def _finding(service: Service, due: DueAction) -> dict[str, Any]:
    """Of the alert that asked for the stop; empty where people did."""
    cause = str(due.payload["cause"])
    with service.database.read() as session:
        event = session.execute(
            select(EventRow.event).filter_by(run_id=due.run_id, id=cause)
        ).scalar_one_or_none()
    finding = {} if event is None else event["data"].get("finding")
    return dict(finding) if isinstance(finding, dict) else {}


_HOW = {ASK: "already ended", ASKED: "cooperative", TERMINATED: "terminated", KILLED: "killed"}
_POLL_NS = NANOSECONDS // 5
_ENDS_NS = NANOSECONDS
"""Last words are found by listing a store, which is not done more often."""
_LONGEST_POLL_NS = 5 * NANOSECONDS
_KILL_PATIENCE_NS = 30 * NANOSECONDS


def try_stop(service: Service, due: DueAction) -> AttemptResult:
    """Take a stop one stage further, or see that it is over.

    Workers are asked whether their job's backend answers or not, for which they wait a few seconds at the most, and the backend
    is asked in its turn whether their store answers or not.

    Raises:
        StoreError, ConfigError: the store does not answer and no job is in sight, or the job's identity cannot be used.
        BackendError: the backend does not answer, and nothing else can be done now.
    """
    target = load_target(service, due.run_id, str(due.payload["attempt"]), hurried=due.stage == ASK)
    if due.stage == ASK:
        return _ask(service, due, target)
    if target.trouble is not None and due.stage != ASKED:
        raise target.trouble
    if not target.in_sight:
        return _await_ends(service, due, target)
    if target.is_over:
        return _over_since(service, due, target)
    if due.stage in INTENDED:
        # Whoever meant to send the signal died before it said so: the job is there, and it is sent again.
        return _press(service, due, target, INTENDED[due.stage])
    silent: WatchstepError | None = None
    try:
        agreed = agree(service, due, target) if due.stage == ASKED else None
    except REFUSED as error:
        agreed, silent = None, error
    if agreed == "refused":
        return _press(service, due, target, TERMINATED)
    if agreed is not None:
        return agreed
    waited = due.now_ns - due.stage_since_ns
    if due.stage == KILLED:
        if waited > _KILL_PATIENCE_NS:
            return AttemptResult(
                "failed",
                f"job {_named(target)} is still there {waited // NANOSECONDS} s after SIGKILL",
                KILLED,
            )
        return _again(due)
    grace = service.settings.grace_seconds + (seconds_left(service, target) if due.stage == ASKED else 0.0)
    if waited < nanoseconds(grace):
        return _again(due)
    return _told_of(silent, _press(service, due, target, due.stage + 1))


def _again(due: DueAction, after_ns: int | None = None) -> AttemptResult:
    """Look again: soon at first, and the more seldom the longer it lasts."""
    return AttemptResult(
        "waiting", "", due.stage, due.now_ns + (_later(due) if after_ns is None else after_ns)
    )


def _later(due: DueAction) -> int:
    return min(_LONGEST_POLL_NS, max(_POLL_NS, (due.now_ns - due.stage_since_ns) // 4))


def _ask(service: Service, due: DueAction, target: StopTarget) -> AttemptResult:
    attempt = target.attempt.attempt
    if target.run.attempt != attempt:
        activity = activity_of(service, target, due.now_ns)
        if activity == "over":
            return AttemptResult("skipped", f"attempt {attempt} is over: {target.run.attempt} runs now")
        if activity == "open":
            return _again(due)
    if target.is_over:
        return _over(service, due, target, ASK)
    step = common_step(service, target)
    reason, cause = str(due.payload["reason"]), str(due.payload["cause"])
    stop = StopRequest(attempt, step, reason, cause, agreed=target.is_alone)
    try:
        control = write_control(service, target, stop)
    except REFUSED as error:
        if target.hurried:
            target = load_target(service, due.run_id, attempt)
            if target.is_over:
                return _over(service, due, target, ASKED)
        if not target.in_sight:
            raise  # there is no other way to the job now
        return _go_on_without_store(service, due, target, error)
    if target.listens:
        assert control.stop is not None
        return AttemptResult(
            "advanced", f"asked all workers to stop at step {control.stop.step}", ASKED, due.now_ns + _POLL_NS
        )
    if target.in_sight:
        return _press(service, due, target, TERMINATED)
    if target.status is not None:
        return _out_of_reach(target)
    facts = {"how": "asked", "stopped_at_step": None}
    return AttemptResult(
        "done",
        "no job bound: asked cooperatively; the program has not agreed to be stopped so",
        UNCONFIRMED,
        facts=facts,
    )


def _go_on_without_store(
    service: Service, due: DueAction, target: StopTarget, refused: WatchstepError
) -> AttemptResult:
    """Workers that announce to a service are asked by its answers; for their job, its grace time has begun."""
    long_asked = due.tries > 0 and due.now_ns - due.stage_since_ns >= nanoseconds(
        service.settings.grace_seconds
    )
    if not target.listens or long_asked:
        return _told_of(refused, _press(service, due, target, TERMINATED))
    detail = (
        f"{refused.what}; the workers are asked by the answers to their announcements alone, and job {_named(target)}"
        f" itself after {service.settings.grace_seconds:g} s ({refused.hint})"
    )
    return AttemptResult("error", detail, ASKED, due.now_ns + _POLL_NS)


def _told_of(refused: WatchstepError | None, tried: AttemptResult) -> AttemptResult:
    """With what the store refused, which made it come to this."""
    return tried if refused is None else replace(tried, detail=f"{refused.what}; {tried.detail}")


def _await_ends(service: Service, due: DueAction, target: StopTarget) -> AttemptResult:
    """Without a job that can be seen, only the workers' own end documents can tell."""
    if target.ends_complete:
        return _over(service, due, target, ASKED)
    agreed = agree(service, due, target)
    if agreed is not None and agreed != "refused":
        return agreed
    if due.now_ns - due.stage_since_ns > nanoseconds(service.settings.silent_seconds):
        if target.status is not None:
            return _out_of_reach(target)
        facts = {"how": "asked", "stopped_at_step": None}
        return AttemptResult(
            "done", "no job bound: asked cooperatively; the workers did not confirm", UNCONFIRMED, facts=facts
        )
    look = listing_due(service, target.place, due.run_id, target.run.listed_ns, due.now_ns)
    if look and at_store(service, target, lambda _: discover(service, due.run_id)).fresh:
        return _again(due, 0)
    # Of several, answers are waited for.
    return _again(due, max(_ENDS_NS, _later(due)) if target.is_alone else None)


def _out_of_reach(target: StopTarget) -> AttemptResult:
    """A job that is not to be seen from here, now or at all.

    Raises:
        BackendError: it is only not to be seen now.
    """
    if target.trouble is not None:
        raise target.trouble
    detail = target.status.detail if target.status is not None else ""
    return AttemptResult("failed", f"job {_named(target)} cannot be stopped from here: {detail}", ASKED)


def _press(service: Service, due: DueAction, target: StopTarget, stage: int) -> AttemptResult:
    """Signal a job. That it is meant to be is committed before: a job that is then found gone was stopped by it."""
    assert target.job is not None
    assert target.backend is not None
    if not _intend(service, due, TERMINATING if stage == TERMINATED else KILLING):
        return AttemptResult(
            "waiting", "", due.stage
        )  # another worker has taken it over: nothing of this is recorded
    failpoint("stop.signalling", due)
    after: JobStatus = (
        target.backend.stop(target.job) if stage == TERMINATED else target.backend.kill(target.job)
    )
    failpoint("stop.signalled", due)
    if after.is_over:
        return _over(service, due, target, stage)
    verb = "asked to end (SIGTERM)" if stage == TERMINATED else "killed (SIGKILL)"
    return AttemptResult("advanced", f"job {_named(target)} {verb}", stage, due.now_ns + _POLL_NS)


def _intend(service: Service, due: DueAction, stage: int) -> bool:
    """Commit that a signal is to be sent; False where the action is another worker's by now."""
    if due.stage == stage:
        return True
    with service.database.write() as session:
        row = ACTION_LEASE.lock(session, due.id, due.claims)
        if row is None or row.state != "pending":
            return False
        row.stage, row.stage_since_ns = stage, read_clock(session)
    return True


def _over_since(service: Service, due: DueAction, target: StopTarget) -> AttemptResult:
    """What a stop came to whose job was found gone: by its own signal, where it may have been sent."""
    if due.stage not in INTENDED:
        return _over(service, due, target, due.stage)
    # The signal may not have gone out; of a program that trained to its end it was not what ended it.
    return _over(service, due, target, ASKED if target.ended_by_itself else INTENDED[due.stage])


def _over(service: Service, due: DueAction, target: StopTarget, stage: int) -> AttemptResult:
    """What a stop came to whose job is gone, or whose workers have all ended.

    Args:
        service: the service.
        due: the stop.
        target: what it is aimed at.
        stage: how far the stop had to go.
    """
    try:
        # Its workers' last words say at which step they stopped.
        at_store(service, target, lambda _: discover(service, due.run_id))
        target = load_target(service, due.run_id, target.attempt.attempt, hurried=target.hurried)
    except REFUSED as error:
        _log.warning("run %s/%s: %s", target.run.project, target.run.run, error.what)
    steps = [int(end["last_step"]) for end in target.attempt.ends.values()]
    facts = {
        "how": _HOW[stage],
        "stopped_at_step": max([target.attempt.largest, *steps]),
        **told(service, due, target),
    }
    named = f"job {_named(target)}" if target.job is not None else "every worker"
    if stage == ASK:
        return AttemptResult("skipped", f"{named} had ended already", facts=facts)
    if stage == ASKED and not target.obeyed:
        if target.ended_by_itself:
            detail = f"{named} has ended by itself: the program did not stop when it was asked"
        elif target.failed_by_itself:
            detail = f"{named} has failed by itself, after it was asked to stop and before it did"
        else:
            detail = f"{named} is gone; no worker has said that it stopped when it was asked"
        return AttemptResult("done", detail, stage, facts={**facts, "how": "asked"})
    return AttemptResult("done", f"{named} is gone ({_HOW[stage]})", stage, facts=facts)


def _named(target: StopTarget) -> str:
    return f"{target.job.backend}:{target.job.id}" if target.job is not None else "none"
