"""Having all workers of an attempt know of one step before any stops there: what follows from their answers.

A step is named; each worker answers (`watchstep.format.control`) and waits at the step rather than passing it. It is agreed on when all
are ready for it, and another is named when one was past it. Whatever is lost on the way, none stops alone: without an
agreement the stop goes on by the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from watchstep.format.control import ControlDocument, StopAnswer, StopRequest, find_answers
from watchstep_services.control import ask, mirror
from watchstep_services.database.models import Run
from watchstep_services.dispatcher.outbox import DueAction, Tried
from watchstep_services.dispatcher.pace import read_pace
from watchstep_services.dispatcher.stages import ASKED
from watchstep_services.dispatcher.target import REFUSED, Target, at_store
from watchstep_services.points import reach
from watchstep_services.service import Service
from watchstep_services.settings import NANOSECONDS

_POLL_NS = NANOSECONDS // 5


def following(
    stop: StopRequest, answers: Sequence[StopAnswer], world_size: int, beyond: int
) -> StopRequest | Literal["refused"] | None:
    """What is asked next.

    Args:
        stop: what was asked, and is not agreed on.
        answers: to it, so far.
        world_size: how many workers there are.
        beyond: a step that should lie ahead of every worker, should another be named.

    Returns:
        The same step, agreed on; a later one, to be agreed on; "refused" where a worker takes no part; None where
        answers are waited for.
    """
    asked = [answer for answer in answers if answer.asked == stop.step]
    if any(answer.state == "refuses" for answer in asked):
        return "refused"
    gone = [answer.at for answer in asked if answer.state in {"passed", "left"}]
    if gone:
        return replace(stop, step=max(beyond, max(gone) + 1, stop.step + 1))
    ready = {answer.worker for answer in asked if answer.state == "ready"}
    # Any number may stand for the world size: the first worker that is missing ends this, and no set of all is made.
    is_agreed = all(worker in ready for worker in range(world_size))
    return replace(stop, agreed=True) if is_agreed else None


def agree(service: Service, due: DueAction, target: Target) -> Tried | Literal["refused"] | None:
    """Take an agreement a step further; None where there is nothing to do about it now.

    Raises:
        StoreError, ConfigError: the store does not answer.
    """
    attempt = target.attempt
    stop = _asked(service, target)
    if stop is None or stop.agreed or stop.attempt != attempt.attempt or target.unread:
        return None
    answers = at_store(service, target, lambda run_store: find_answers(run_store, stop.attempt, stop.step))
    pace, now = read_pace(service, target)
    gone = max((answer.at for answer in answers), default=-1)
    beyond = max(pace.largest, gone, stop.step) + pace.margin(now)
    workers = max(1, attempt.world_size)
    found = following(stop, answers, workers, beyond)
    if found is None or found == "refused":
        return found
    _put(service, target, stop, found)
    told = (
        f"all {workers} workers have agreed to stop at step {found.step}"
        if found.agreed
        else f"a worker was past step {stop.step}: asked all to stop at step {found.step}"
    )
    return Tried("advanced", told, ASKED, due.now_ns + _POLL_NS)


def seconds_left(service: Service, target: Target) -> float:
    """How long the workers should take to the step that they were asked to stop at, beyond which they are not waited for."""
    stop = _asked(service, target)
    return 0.0 if stop is None else read_pace(service, target)[0].seconds_to(stop.step)


def _asked(service: Service, target: Target) -> StopRequest | None:
    with service.database.read() as session:
        return ControlDocument.from_data(session.get_one(Run, target.run.id).control).stop


def _put(service: Service, target: Target, before: StopRequest, after: StopRequest) -> None:
    with service.database.write() as session:
        ask(session, target.run.id, lambda held: held.with_stop(after) if held.stop == before else held)
    reach("control.in_database", target.run.id)
    try:
        # Now; should that fail, the action that was asked for sees to it.
        at_store(service, target, lambda run_store: mirror(service, target.run.id, run_store))
    except REFUSED:
        return
    reach("control.on_store", target.run.id)
