"""When a step is sealed: every live worker has passed it, or the silent ones have been waited for long enough."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Cause = Literal["passed", "deadline"]


@dataclass(frozen=True)
class WriterProgress:
    """How far one rank came by one writer; earlier versions kept one entry for all ranks of a writer.

    Attributes:
        last: the last step of which it wrote rows.
        heard_ns: when its newest segment was found, by the database's clock.
        workers: ranks whose rows it wrote.
    """

    last: int
    heard_ns: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class AttemptProgress:
    """How far an attempt came.

    Attributes:
        world_size: workers to expect; 0 where nobody has said.
        first_heard_ns: when its first segment was found.
        writers: by "node/writer/rank".
        ended: ranks that ended and whose segments have all been read.
        sealed: the last sealed step, -1 for none.
    """

    world_size: int
    first_heard_ns: int
    writers: dict[str, WriterProgress]
    ended: frozenset[int]
    sealed: int

    @property
    def largest(self) -> int:
        """The largest step that any worker passed, -1 for none."""
        return max((writer.last for writer in self.writers.values()), default=-1)

    def heard(self, writer: str, seen: WriterProgress) -> AttemptProgress:
        """After another segment of a writer."""
        before = self.writers.get(writer)
        if before is not None:
            seen = WriterProgress(
                max(before.last, seen.last),
                max(before.heard_ns, seen.heard_ns),
                tuple(sorted({*before.workers, *seen.workers})),
            )
        first = min(self.first_heard_ns or seen.heard_ns, seen.heard_ns)
        return replace(self, writers={**self.writers, writer: seen}, first_heard_ns=first)


@dataclass(frozen=True)
class SealDecision:
    """Steps up to this one are sealed, and why."""

    step: int
    cause: Cause


def decide(progress: AttemptProgress, now_ns: int, deadline_ns: int) -> SealDecision | None:
    """The seal that can be set now, if it is beyond the last one.

    Args:
        progress: how far the attempt came.
        now_ns: the tick.
        deadline_ns: how long a silent worker is waited for.
    """
    live = _live(progress)
    passed = min((step for step, _ in live), default=progress.largest)
    if passed > progress.sealed:
        return SealDecision(passed, "passed")
    fresh = [step for step, heard in live if now_ns - heard < deadline_ns]
    reached = min(fresh, default=progress.largest)
    return SealDecision(reached, "deadline") if reached > progress.sealed else None


def due_ns(progress: AttemptProgress, deadline_ns: int) -> int | None:
    """When a silent worker's deadline next lets steps be sealed; None where nothing waits."""
    behind = [heard for step, heard in _live(progress) if step < progress.largest]
    waits = progress.sealed < progress.largest
    return min(behind) + deadline_ns if waits and behind else None


def _live(progress: AttemptProgress) -> list[tuple[int, int]]:
    """(last passed step, last heard) of each rank that has not ended; one (-1, start) for those never heard."""
    ranks: dict[int, tuple[int, int]] = {}
    for writer in progress.writers.values():
        for rank in writer.workers:
            step, heard = ranks.get(rank, (-1, 0))
            ranks[rank] = (max(step, writer.last), max(heard, writer.heard_ns))
    live = [held for rank, held in ranks.items() if rank not in progress.ended]
    known = {*ranks, *progress.ended}
    # One stands for all that were never heard: how many there are is only what somebody wrote, and may be any number.
    if progress.world_size > sum(0 <= rank < progress.world_size for rank in known):
        live.append((-1, progress.first_heard_ns))
    return live


def writers_as_data(writers: dict[str, WriterProgress]) -> dict[str, Any]:
    """A JSON-ready form."""
    return {name: [held.last, held.heard_ns, list(held.workers)] for name, held in writers.items()}


def writers_from_data(data: dict[str, Any]) -> dict[str, WriterProgress]:
    """Read what `writers_as_data` gave."""
    return {
        name: WriterProgress(last, heard, tuple(workers)) for name, (last, heard, workers) in data.items()
    }
