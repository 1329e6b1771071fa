"""How far the watermark advances: to the last step that every live worker has passed, or whose allowed lateness is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Cause = Literal["passed", "deadline", "rows"]

MOST_ROWS = 1_000_000
"""Rows of an attempt above the watermark, about 0.4 GB. Beyond that the watermark advances though a worker is behind, until half of
them are left."""


@dataclass(frozen=True)
class WriterProgress:
    """How far one rank came by one writer; earlier versions kept one entry for all ranks of a writer.

    Attributes:
        last: the last step of which it wrote rows.
        last_seen_ns: when its newest segment was found, by the database's clock.
        workers: ranks whose rows it wrote.
    """

    last: int
    last_seen_ns: int
    workers: tuple[int, ...]

    def merged(self, other: WriterProgress) -> WriterProgress:
        """The further of both."""
        return WriterProgress(
            max(self.last, other.last),
            max(self.last_seen_ns, other.last_seen_ns),
            tuple(sorted({*self.workers, *other.workers})),
        )


@dataclass(frozen=True)
class AttemptProgress:
    """How far an attempt came.

    Attributes:
        world_size: workers to expect; 0 where nobody has said.
        first_seen_ns: when its first segment was found.
        writers: by "node/writer/rank".
        ended: ranks that ended and whose segments have all been read.
        watermark: the last step that every worker has passed, -1 for none.
    """

    world_size: int
    first_seen_ns: int
    writers: dict[str, WriterProgress]
    ended: frozenset[int]
    watermark: int

    @property
    def largest(self) -> int:
        """The largest step that any worker passed, -1 for none."""
        return max((writer.last for writer in self.writers.values()), default=-1)

    def heard(self, entries: Iterable[tuple[str, WriterProgress]]) -> AttemptProgress:
        """After further segments: of each rank in them, by "node/writer/rank", how far it came."""
        writers, first = dict(self.writers), self.first_seen_ns
        for name, seen in entries:
            before = writers.get(name)
            first = min(first or seen.last_seen_ns, seen.last_seen_ns)
            writers[name] = seen if before is None else before.merged(seen)
        return replace(self, writers=writers, first_seen_ns=first)


@dataclass(frozen=True)
class WatermarkAdvance:
    """The watermark comes to this step, and why."""

    step: int
    cause: Cause


def decide(progress: AttemptProgress, now_ns: int, deadline_ns: int) -> WatermarkAdvance | None:
    """The advance that can be set now, if it is beyond the last one.

    Args:
        progress: how far the attempt came.
        now_ns: the tick.
        deadline_ns: how long a silent worker is waited for.
    """
    live = _live(progress)
    passed = min((step for step, _ in live), default=progress.largest)
    if passed > progress.watermark:
        return WatermarkAdvance(passed, "passed")
    # Beyond the deadline ahead it was heard before the clock was set back, and nobody knows how long ago that is.
    fresh = [step for step, heard in live if -deadline_ns <= now_ns - heard < deadline_ns]
    reached = min(fresh, default=progress.largest)
    return WatermarkAdvance(reached, "deadline") if reached > progress.watermark else None


def bounded(
    advance: WatermarkAdvance | None, watermark: int, waiting: NDArray[np.int64]
) -> WatermarkAdvance | None:
    """The advance that can be set now, or one that must be set, where more rows wait than memory may hold.

    A worker that is heard and stays behind could keep every other one's rows in memory for good.

    Args:
        advance: what `decide` gave.
        watermark: the watermark.
        waiting: int64 of shape (n,), steps of the rows that are in memory.
    """
    step = watermark if advance is None else advance.step
    left = waiting[waiting > step]
    if len(left) <= MOST_ROWS:
        return advance
    place = len(left) - MOST_ROWS // 2
    return WatermarkAdvance(int(np.partition(left, place)[place]), "rows")


def due_ns(progress: AttemptProgress, deadline_ns: int) -> int | None:
    """When a silent worker's deadline next lets the watermark advance; None where nothing waits."""
    largest = progress.largest  # it looks at every writer
    behind = [heard for step, heard in _live(progress) if step < largest]
    waits = progress.watermark < largest
    return min(behind) + deadline_ns if waits and behind else None


def _live(progress: AttemptProgress) -> list[tuple[int, int]]:
    """(last passed step, last heard) of each rank that has not ended; one (-1, start) for those never heard."""
    ranks: dict[int, tuple[int, int]] = {}
    for writer in progress.writers.values():
        for rank in writer.workers:
            step, heard = ranks.get(rank, (-1, 0))
            ranks[rank] = (max(step, writer.last), max(heard, writer.last_seen_ns))
    live = [writer for rank, writer in ranks.items() if rank not in progress.ended]
    known_ranks = {*ranks, *progress.ended}
    # One stands for all that were never heard: how many there are is only what somebody wrote, and may be any number.
    if progress.world_size > sum(0 <= rank < progress.world_size for rank in known_ranks):
        live.append((-1, progress.first_seen_ns))
    return live


def writers_as_data(writers: dict[str, WriterProgress]) -> dict[str, Any]:
    """A JSON-ready form."""
    return {
        name: [writer.last, writer.last_seen_ns, list(writer.workers)] for name, writer in writers.items()
    }


def writers_from_data(data: dict[str, Any]) -> dict[str, WriterProgress]:
    """Read what `writers_as_data` gave."""
    return {
        name: WriterProgress(last, heard, tuple(workers)) for name, (last, heard, workers) in data.items()
    }
