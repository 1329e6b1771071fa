"""The stop barrier: all workers of an attempt agree on one step before any of them stops there.

A step is proposed; each worker answers (`watchstep.format.control`) and waits at the step rather than passing it. It is agreed
on when all are ready for it, and a later step is proposed when one has passed it. The pace of the attempt and the delay of its
workers decide how far ahead a step must be. Whatever is lost on the way, no worker stops alone: without an agreement the
stop goes on through the backend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from sqlalchemy import func, select

from watchstep.format.control import ControlDocument, StopAnswer, StopRequest, find_answers
from watchstep_services.core.due_action import AttemptResult, DueAction
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import RunRow, Segment
from watchstep_services.dispatch.target import REFUSED, StopTarget, at_store
from watchstep_services.runs.control import ask, mirror
from watchstep_services.runs.stops import ASKED
from watchstep_services.service.context import Service

_RECENT = 40
_SHORTEST_SPAN = 0.05
"""Seconds; segments that were found closer together were found by one look, which tells nothing of the pace."""
_UNKNOWN_MARGIN = 10
_LEAST_MARGIN = 2
_DELIVERY_SECONDS = 1.0
_LONGEST_HEARING = 35.0
"""Seconds: a writer's longest interval, and its way."""
_SPARE = 1.5
_LONGEST_EXPECTED = 300.0


@dataclass(frozen=True)
class SegmentArrival:
    """A segment as it came: its writer, its steps (both inclusive), and when it was found."""

    writer: str
    first: int
    last: int
    found_ns: int


@dataclass(frozen=True)
class AttemptPace:
    """How an attempt goes on.

    Attributes:
        largest: the largest step that was seen.
        seen_ns: when.
        steps_per_second: the fastest of late; None where it cannot be told.
        hearing_seconds: from one announcement of a writer to the next, at the most of late, and the way of the answer.
        width: steps of the longest segment of late.
    """

    largest: int
    seen_ns: int
    steps_per_second: float | None
    hearing_seconds: float
    width: int

    @classmethod
    def of(cls, announced: Iterable[SegmentArrival], largest: int, now_ns: int) -> AttemptPace:
        """Told from recent segments.

        Args:
            announced: in the order in which they came.
            largest: the largest step that is known besides.
            now_ns: the database's clock.
        """
        by_writer: dict[str, list[SegmentArrival]] = {}
        for arrival in announced:
            by_writer.setdefault(arrival.writer, []).append(arrival)
        every = [arrival for arrivals in by_writer.values() for arrival in arrivals]
        newest = max(every, key=lambda arrival: arrival.last, default=None)
        paces = [pace for arrivals in by_writer.values() for pace in _paces(arrivals)]
        gaps = [
            (after.found_ns - before.found_ns) / NANOSECONDS
            for arrivals in by_writer.values()
            for before, after in pairwise(arrivals)
        ]
        return cls(
            largest if newest is None else max(largest, newest.last),
            now_ns if newest is None else newest.found_ns,
            max(paces, default=None),
            min(_LONGEST_HEARING, max(gaps, default=_DELIVERY_SECONDS)) + _DELIVERY_SECONDS,
            max((arrival.last - arrival.first + 1 for arrival in every), default=1),
        )

    def margin(self, now_ns: int) -> int:
        """Steps that the workers may make until all have heard of something, from the largest that was seen.

        They have gone on since that was seen, and each hears only with its next announcement.
        """
        if self.steps_per_second is None:
            return max(_UNKNOWN_MARGIN, 2 * self.width)
        age = min(max(0.0, (now_ns - self.seen_ns) / NANOSECONDS), self.hearing_seconds)
        return max(_LEAST_MARGIN, math.ceil(_SPARE * self.steps_per_second * (age + self.hearing_seconds)))

    def seconds_to(self, step: int) -> float:
        """How long it should take to a step: 0 where that cannot be told, and five minutes at most."""
        if not self.steps_per_second:
            return 0.0
        return min(_LONGEST_EXPECTED, max(0, step - self.largest) / self.steps_per_second)


def read_pace(service: Service, target: StopTarget) -> tuple[AttemptPace, int]:
    """How a target goes on, and the database's clock."""
    named = {"run_id": target.run.id, "attempt": target.attempt.attempt}
    columns = (Segment.node, Segment.writer, Segment.first, Segment.last, Segment.found_ns)
    with service.database.read() as session:
        now = read_clock(session)
        largest = session.execute(select(func.max(Segment.last)).filter_by(**named)).scalar_one()
        rows = session.execute(
            select(*columns).filter_by(**named).order_by(Segment.id.desc()).limit(_RECENT)
        ).all()
    recent = [
        SegmentArrival(f"{node}/{writer}", first, last, next_stop)
        for node, writer, first, last, next_stop in rows[::-1]
    ]
    largest_step = max(target.attempt.largest, -1 if largest is None else int(largest))
    return AttemptPace.of(recent, largest_step, now), now


def common_step(service: Service, target: StopTarget) -> int:
    """A step beyond every one that a worker has passed, at which all can stop together.

    One worker stops at its next step. Of several, each has to hear of it first.
    """
    pace, now = read_pace(service, target)
    return pace.largest + (1 if target.is_alone else pace.margin(now))


def _paces(arrivals: Sequence[SegmentArrival]) -> Iterable[float]:
    """Steps per second over all, and over the newest that came apart: a training may have become faster."""
    newest = arrivals[-1]
    for before in (arrivals[0], *arrivals[-4:-1]):
        seconds = (newest.found_ns - before.found_ns) / NANOSECONDS
        if seconds >= _SHORTEST_SPAN and newest.last > before.last:
            yield (newest.last - before.last) / seconds


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


def agree(service: Service, due: DueAction, target: StopTarget) -> AttemptResult | Literal["refused"] | None:
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
    next_stop = following(stop, answers, workers, beyond)
    if next_stop is None or next_stop == "refused":
        return next_stop
    _put(service, target, stop, next_stop)
    told = (
        f"all {workers} workers have agreed to stop at step {next_stop.step}"
        if next_stop.agreed
        else f"a worker was past step {stop.step}: asked all to stop at step {next_stop.step}"
    )
    return AttemptResult("advanced", told, ASKED, due.now_ns + _POLL_NS)


def seconds_left(service: Service, target: StopTarget) -> float:
    """How long the workers should take to the step that they were asked to stop at, beyond which they are not waited for."""
    stop = _asked(service, target)
    return 0.0 if stop is None else read_pace(service, target)[0].seconds_to(stop.step)


def _asked(service: Service, target: StopTarget) -> StopRequest | None:
    with service.database.read() as session:
        return ControlDocument.from_data(session.get_one(RunRow, target.run.id).control).stop


def _put(service: Service, target: StopTarget, before: StopRequest, after: StopRequest) -> None:
    with service.database.write() as session:
        ask(
            session,
            target.run.id,
            lambda arrivals: arrivals.with_stop(after) if arrivals.stop == before else arrivals,
        )
    failpoint("control.in_database", target.run.id)
    try:
        # Now; should that fail, the action that was asked for sees to it.
        at_store(service, target, lambda run_store: mirror(service, target.run.id, run_store))
    except REFUSED:
        return
    failpoint("control.on_store", target.run.id)
