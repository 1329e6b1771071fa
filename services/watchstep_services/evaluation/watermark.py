"""The watermark: the last step that every live worker has passed, or for which the allowed lateness is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Cause = Literal["passed", "deadline", "rows"]

MOST_ROWS = 1_000_000
"""Limit of rows of an attempt above the watermark, about 0.4 GB. Beyond it the watermark advances past lagging workers until half of
the rows are left."""


@dataclass(frozen=True)
class RankProgress:
    """Progress of one rank.

    Attributes:
        last: the last step with rows.
        last_seen_ns: when the newest segment with its rows was found, by the database's clock.
    """

    last: int
    last_seen_ns: int

    def merged(self, other: RankProgress) -> RankProgress:
        """The larger step and time of both."""
        return RankProgress(max(self.last, other.last), max(self.last_seen_ns, other.last_seen_ns))


@dataclass(frozen=True)
class AttemptProgress:
    """Progress of an attempt.

    Attributes:
        world_size: expected workers; 0 if unknown.
        first_seen_ns: when the first segment was found.
        ranks: progress of each rank with rows.
        ended: ranks that have ended and have no segment left to read.
        watermark: the last step that every worker has passed; -1 for none.
    """

    world_size: int
    first_seen_ns: int
    ranks: dict[int, RankProgress]
    ended: frozenset[int]
    watermark: int

    @property
    def largest(self) -> int:
        """The largest step that any worker has passed; -1 for none."""
        return max((rank.last for rank in self.ranks.values()), default=-1)

    def with_segments(self, entries: Iterable[tuple[int, RankProgress]]) -> AttemptProgress:
        """The progress after further segments, given as pairs of a rank and its progress."""
        ranks, first = dict(self.ranks), self.first_seen_ns
        for rank, seen in entries:
            before = ranks.get(rank)
            first = min(first or seen.last_seen_ns, seen.last_seen_ns)
            ranks[rank] = seen if before is None else before.merged(seen)
        return replace(self, ranks=ranks, first_seen_ns=first)


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
    largest = progress.largest  # computed once: it iterates over all ranks
    behind = [seen_ns for step, seen_ns in _live(progress) if step < largest]
    waits = progress.watermark < largest
    return min(behind) + deadline_ns if waits and behind else None


def _live(progress: AttemptProgress) -> list[tuple[int, int]]:
    """(last passed step, last seen) of each live rank, and one (-1, start) for all ranks without segments."""
    live = [
        (seen.last, seen.last_seen_ns) for rank, seen in progress.ranks.items() if rank not in progress.ended
    ]
    known_ranks = {*progress.ranks, *progress.ended}
    # One entry represents all missing ranks: the world size is a recorder's claim and may be any number.
    if progress.world_size > sum(0 <= rank < progress.world_size for rank in known_ranks):
        live.append((-1, progress.first_seen_ns))
    return live


def ranks_as_data(ranks: dict[int, RankProgress]) -> dict[str, list[int]]:
    """Convert to JSON-ready data."""
    return {str(rank): [seen.last, seen.last_seen_ns] for rank, seen in ranks.items()}


def ranks_from_data(data: dict[str, list[int]]) -> dict[int, RankProgress]:
    """Read the result of `ranks_as_data`."""
    return {int(rank): RankProgress(last, seen_ns) for rank, (last, seen_ns) in data.items()}
