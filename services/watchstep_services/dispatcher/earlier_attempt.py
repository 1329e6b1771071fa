"""Whether an attempt that is not its run's newest goes on all the same, so that a stop of it is to be carried out.

Which attempt is the newest follows from when each began by its own clock. Machines' clocks differ: a program that is started again on another
machine may seem to have begun before the attempt that it replaces. What was found of each lately, by the database's clock, shows which one goes on.
"""

from __future__ import annotations

from typing import Literal

from watchstep.format.control import ControlDocument
from watchstep_services.database.models import Attempt
from watchstep_services.dispatcher.target import Target
from watchstep_services.evaluator import attempts
from watchstep_services.service import Service
from watchstep_services.settings import NANOSECONDS
from watchstep_services.tenancy.jobs import bound_job

_AHEAD_NS = 15 * NANOSECONDS
"""So much later than the newest attempt's newest segment one of this attempt was found: the newest attempt has ceased."""

_SILENT_NS = 60 * NANOSECONDS
"""After so long without a segment, with another attempt running, an attempt is over: what remained of it was uploaded late."""

Standing = Literal["over", "open", "goes_on"]


def standing_of(service: Service, target: Target, now_ns: int) -> Standing:
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
    if newest.first_heard_ns > own_ns and not runs:
        return "over"
    stop = ControlDocument.from_data(target.run.control).stop
    has_ended = len(newest.ends) >= max(1, newest.world_size)
    if not has_ended and stop is not None and stop.attempt == newest.attempt:
        return "open"
    if runs:
        return "goes_on"
    return "goes_on" if has_ended or own_ns - _last_heard_ns(newest) >= _AHEAD_NS else "open"


def _runs_in_its_own_job(service: Service, target: Target) -> bool:
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
    return max((int(heard_ns) for _, heard_ns, _ in attempt.writers.values()), default=0)
