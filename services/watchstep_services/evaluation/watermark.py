"""The watermark: the last step that every live worker has passed, or for which the allowed lateness is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Cause = Literal["passed", "deadline", "rows"]

MOST_ROWS = 1_000_000
"""Limit of rows of an attempt above the watermark, about 0.4 GB. Beyond it the watermark advances past lagging workers until half of
the rows are left."""


@dataclass(frozen=True)
class WriterProgress:
    """Progress of one rank by one writer. Earlier versions stored one entry for all ranks of a writer.

    Attributes:
        last: the last step with rows.
        last_seen_ns: when the newest segment was found, by the database's clock.
        workers: ranks with rows.
    """

    last: int
    last_seen_ns: int
    workers: tuple[int, ...]

    def merged(self, other: WriterProgress) -> WriterProgress:
        """The larger step and time of both."""
        return WriterProgress(
            max(self.last, other.last),
            max(self.last_seen_ns, other.last_seen_ns),
            tuple(sorted({*self.workers, *other.workers})),
        )


@dataclass(frozen=True)
class AttemptProgress:
    """Progress of an attempt.

    Attributes:
        world_size: expected workers; 0 if unknown.
        first_seen_ns: when the first segment was found.
        writers: progress by "node/writer/rank".
        ended: ranks that have ended and have no segment left to read.
        watermark: the last step that every worker has passed; -1 for none.
    """

    world_size: int
    first_seen_ns: int
    writers: dict[str, WriterProgress]
    ended: frozenset[int]
    watermark: int

    @property
    def largest(self) -> int:
        """The largest step that any worker has passed; -1 for none."""
        return max((writer.last for writer in self.writers.values()), default=-1)

    def with_segments(self, entries: Iterable[tuple[str, WriterProgress]]) -> AttemptProgress:
        """The progress after further segments, given as pairs of "node/writer/rank" and the rank's progress."""
        writers, first = dict(self.writers), self.first_seen_ns
        for name, seen in entries:
            before = writers.get(name)
            first = min(first or seen.last_seen_ns, seen.last_seen_ns)
            writers[name] = seen if before is None else before.merged(seen)
        return replace(self, writers=writers, first_seen_ns=first)


@dataclass(frozen=True)
class WatermarkAdvance:
    """A step to which the watermark advances, and why."""

    step: int
    cause: Cause


def decide(progress: AttemptProgress, now_ns: int, deadline_ns: int) -> WatermarkAdvance | None:
    """Return the advance that is possible now; None if the watermark stays.

    Args:
        progress: progress of the attempt.
        now_ns: time of the tick.
        deadline_ns: the allowed lateness of a silent worker.
    """
    live = _live(progress)
    passed = min((step for step, _ in live), default=progress.largest)
    if passed > progress.watermark:
        return WatermarkAdvance(passed, "passed")
    # A rank seen more than the deadline in the future was seen before the clock was set back, an unknown time ago.
    fresh = [step for step, seen_ns in live if -deadline_ns <= now_ns - seen_ns < deadline_ns]
    reached = min(fresh, default=progress.largest)
    return WatermarkAdvance(reached, "deadline") if reached > progress.watermark else None


def expired_ns(progress: AttemptProgress, now_ns: int, deadline_ns: int) -> int:
    """When the last deadline of a silent worker expired, at most the time of the tick; 0 if no worker is silent."""
    expired = [
        seen_ns + deadline_ns for _, seen_ns in _live(progress) if abs(now_ns - seen_ns) >= deadline_ns
    ]
    return min(now_ns, max(expired, default=0))


def bounded(
    advance: WatermarkAdvance | None, watermark: int, waiting: NDArray[np.int64]
) -> WatermarkAdvance | None:
    """Return the given advance, or a further one if more rows wait than may be kept in memory.

    Otherwise a worker that delivers rows and lags behind would keep all other workers' rows in memory indefinitely.

    Args:
        advance: result of `decide`.
        watermark: the watermark.
        waiting: int64 of shape (n,), steps of the rows in memory.
    """
    step = watermark if advance is None else advance.step
    left = waiting[waiting > step]
    if len(left) <= MOST_ROWS:
        return advance
    middle = len(left) - MOST_ROWS // 2
    return WatermarkAdvance(int(np.partition(left, middle)[middle]), "rows")


def due_ns(progress: AttemptProgress, deadline_ns: int) -> int | None:
    """When a silent worker's deadline next advances the watermark; None if nothing waits."""
    largest = progress.largest  # computed once: it iterates over all writers
    behind = [seen_ns for step, seen_ns in _live(progress) if step < largest]
    waits = progress.watermark < largest
    return min(behind) + deadline_ns if waits and behind else None


def _live(progress: AttemptProgress) -> list[tuple[int, int]]:
    """(last passed step, last seen) of each live rank, and one (-1, start) for all ranks without segments."""
    ranks: dict[int, tuple[int, int]] = {}
    for writer in progress.writers.values():
        for rank in writer.workers:
            step, seen_ns = ranks.get(rank, (-1, 0))
            ranks[rank] = (max(step, writer.last), max(seen_ns, writer.last_seen_ns))
    live = [writer for rank, writer in ranks.items() if rank not in progress.ended]
    known_ranks = {*ranks, *progress.ended}
    # One entry represents all missing ranks: the world size is a recorder's claim and may be any number.
    if progress.world_size > sum(0 <= rank < progress.world_size for rank in known_ranks):
        live.append((-1, progress.first_seen_ns))
    return live


def writers_as_data(writers: dict[str, WriterProgress]) -> dict[str, Any]:
    """Convert to JSON-ready data."""
    return {
        name: [writer.last, writer.last_seen_ns, list(writer.workers)] for name, writer in writers.items()
    }


def writers_from_data(data: dict[str, Any]) -> dict[str, WriterProgress]:
    """Read the result of `writers_as_data`."""
    return {
        name: WriterProgress(last, seen_ns, tuple(workers)) for name, (last, seen_ns, workers) in data.items()
    }
