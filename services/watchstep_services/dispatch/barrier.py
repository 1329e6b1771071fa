"""The stop barrier: all workers of an attempt agree on one step before any of them stops there.

The service proposes a step. Each worker answers (`watchstep.format.control`), and waits at the step rather than passing it. The step
is agreed on when all workers are ready for it. If a worker has passed it, a later step is proposed. The attempt's pace and the workers'
delay determine how far ahead the proposed step is. No worker stops alone, whatever is lost on the way: without an agreement the
stop continues through the backend.
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
from watchstep_services.runs.control import mirror, request_change
from watchstep_services.runs.stops import StopStage
from watchstep_services.service.context import Service

_RECENT = 40
_SHORTEST_SPAN = 0.05
"""Seconds; segments that were found closer together were found by one listing, and give no information on the pace."""
_UNKNOWN_MARGIN = 10
_LEAST_MARGIN = 2
_DELIVERY_SECONDS = 1.0
_LONGEST_RESPONSE = 35.0
"""Seconds: a writer's longest interval and the delivery."""
_SPARE = 1.5
_LONGEST_EXPECTED = 300.0


@dataclass(frozen=True)
class SegmentArrival:
    """A segment's writer, its steps (both inclusive), and when it was found."""

    writer: str
    first: int
    last: int
    found_ns: int


@dataclass(frozen=True)
class AttemptPace:
    """The pace of an attempt.

    Attributes:
        largest: the largest step that was seen.
        seen_ns: when it was seen.
        steps_per_second: the fastest recent pace; None if it cannot be determined.
        response_seconds: the longest recent interval between announcements of a writer, and the delivery of the answer.
        width: steps of the longest recent segment.
    """

    largest: int
    seen_ns: int
    steps_per_second: float | None
    response_seconds: float
    width: int

    @classmethod
    def of(cls, announced: Iterable[SegmentArrival], largest: int, now_ns: int) -> AttemptPace:
        """Estimate the pace from recent segments.

        Args:
            announced: segments in the order in which they were found.
            largest: the largest step known otherwise.
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
            min(_LONGEST_RESPONSE, max(gaps, default=_DELIVERY_SECONDS)) + _DELIVERY_SECONDS,
            max((arrival.last - arrival.first + 1 for arrival in every), default=1),
        )

    def margin(self, now_ns: int) -> int:
        """Steps after the largest seen step that the workers may complete before all have received a request.

        Workers have continued since that step was seen, and each receives the request with its next announcement.
        """
        if self.steps_per_second is None:
            return max(_UNKNOWN_MARGIN, 2 * self.width)
        age = min(max(0.0, (now_ns - self.seen_ns) / NANOSECONDS), self.response_seconds)
        return max(_LEAST_MARGIN, math.ceil(_SPARE * self.steps_per_second * (age + self.response_seconds)))

    def seconds_to(self, step: int) -> float:
        """Expected time until a step: 0 if it cannot be determined, and five minutes at most."""
        if not self.steps_per_second:
            return 0.0
        return min(_LONGEST_EXPECTED, max(0, step - self.largest) / self.steps_per_second)


def read_pace(service: Service, target: StopTarget) -> tuple[AttemptPace, int]:
    """The pace of a target, and the database's clock.

    Only segments that were read count: anyone who may record in the project can announce any step, and a stop after it would never come.
    """
    named = {"run_id": target.run.id, "attempt": target.attempt.attempt, "state": "read"}
    columns = (Segment.node, Segment.writer, Segment.first, Segment.last, Segment.found_ns)
    with service.database.read() as session:
        now = read_clock(session)
        largest = session.execute(select(func.max(Segment.last)).filter_by(**named)).scalar_one()
        rows = session.execute(
            select(*columns).filter_by(**named).order_by(Segment.id.desc()).limit(_RECENT)
        ).all()
    recent = [
        SegmentArrival(f"{node}/{writer}", first, last, found_ns)
        for node, writer, first, last, found_ns in rows[::-1]
    ]
    largest_step = max(target.attempt.largest, -1 if largest is None else int(largest))
    return AttemptPace.of(recent, largest_step, now), now


def common_step(service: Service, target: StopTarget) -> int:
    """A step after every step that a worker has passed, at which all can stop together.

    A single worker stops at its next step. Several workers have to receive the request first.
    """
    pace, now = read_pace(service, target)
    return pace.largest + (1 if target.is_alone else pace.margin(now))


def _paces(arrivals: Sequence[SegmentArrival]) -> Iterable[float]:
    """Steps per second over all segments, and over the newest ones, because a training may have become faster."""
    newest = arrivals[-1]
    for before in (arrivals[0], *arrivals[-4:-1]):
        seconds = (newest.found_ns - before.found_ns) / NANOSECONDS
        if seconds >= _SHORTEST_SPAN and newest.last > before.last:
            yield (newest.last - before.last) / seconds


_POLL_NS = NANOSECONDS // 5


def following(
    stop: StopRequest, answers: Sequence[StopAnswer], world_size: int, beyond: int
) -> StopRequest | Literal["refused"] | None:
    """The next request.

    Args:
        stop: the current request, which is not agreed on.
        answers: answers to it so far.
        world_size: number of workers.
        beyond: a step ahead of every worker, for a new proposal.

    Returns:
        The same step, agreed on; a later step, to be agreed on; "refused" if a worker does not take part; None while
        answers are pending.
    """
    to_step = [answer for answer in answers if answer.requested_step == stop.step]
    if any(answer.state == "refuses" for answer in to_step):
        return "refused"
    passed = [answer.at for answer in to_step if answer.state in {"passed", "left"}]
    if passed:
        return replace(stop, step=max(beyond, max(passed) + 1, stop.step + 1))
    ready = {answer.worker for answer in to_step if answer.state == "ready"}
    # The world size may be any number, so the loop ends at the first missing worker and no set of all workers is built.
    is_agreed = all(worker in ready for worker in range(world_size))
    return replace(stop, agreed=True) if is_agreed else None


def agree(service: Service, due: DueAction, target: StopTarget) -> AttemptResult | Literal["refused"] | None:
    """Advance an agreement; None if there is nothing to do now.

    Raises:
        StoreError, ConfigError: the store does not answer.
    """
    attempt = target.attempt
    stop = _requested(service, target)
    if stop is None or stop.agreed or stop.attempt != attempt.attempt or target.unread:
        return None
    answers = at_store(service, target, lambda run_store: find_answers(run_store, stop.attempt, stop.step))
    pace, now = read_pace(service, target)
    passed = max((answer.at for answer in answers), default=-1)
    beyond = max(pace.largest, passed, stop.step) + pace.margin(now)
    workers = max(1, attempt.world_size)
    next_stop = following(stop, answers, workers, beyond)
    if next_stop is None or next_stop == "refused":
        return next_stop
    _put(service, target, stop, next_stop)
    detail = (
        f"all {workers} workers have agreed to stop at step {next_stop.step}"
        if next_stop.agreed
        else f"a worker was past step {stop.step}: asked all to stop at step {next_stop.step}"
    )
    return AttemptResult("advanced", detail, StopStage.REQUESTED, due.now_ns + _POLL_NS)


def seconds_left(service: Service, target: StopTarget) -> float:
    """Expected time until the requested step, after which the workers are not waited for."""
    stop = _requested(service, target)
    return 0.0 if stop is None else read_pace(service, target)[0].seconds_to(stop.step)


def _requested(service: Service, target: StopTarget) -> StopRequest | None:
    with service.database.read() as session:
        return ControlDocument.from_data(session.get_one(RunRow, target.run.id).control).stop


def _put(service: Service, target: StopTarget, before: StopRequest, after: StopRequest) -> None:
    with service.database.write() as session:
        request_change(
            session,
            target.run.id,
            lambda document: document.with_stop(after) if document.stop == before else document,
        )
    failpoint("control.in_database", target.run.id)
    try:
        # Written at once; if that fails, the outbox action writes it.
        at_store(service, target, lambda run_store: mirror(service, target.run.id, run_store))
    except REFUSED:
        return
    failpoint("control.on_store", target.run.id)
