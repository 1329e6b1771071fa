"""Records with a condition that is evaluated only when the device has finished."""

from __future__ import annotations

from dataclasses import dataclass

from tests.sdk.format.blocks import gradient
from watchstep.capture.health import RecorderHealth
from watchstep.capture.steps.record import BoundedQueue, Group, join
from watchstep.capture.steps.recorder import Recorder
from watchstep.format.statistics import scalars
from watchstep.kernels.measurement import Completed


@dataclass(frozen=True)
class KnownCondition:
    """A condition that is answered already."""

    answer: bool

    def is_met(self) -> bool:
        return self.answer


def rows(recorder: Recorder, queue: BoundedQueue) -> dict[str, float]:
    recorder.finish()
    recorder.begin()
    item = queue.take()
    assert item is not None
    block = join(list(item.records))
    return {block.info(row).name: block.statistics.mean[row] for row in range(len(block))}


def recorder() -> tuple[Recorder, BoundedQueue]:
    queue = BoundedQueue(1 << 20)
    return Recorder(0, queue, RecorderHealth(), "ignore"), queue


def test_what_does_not_hold_is_omitted() -> None:
    target, queue = recorder()
    for name, answer in (("a", True), ("b", False)):
        target.add(Group.of((gradient(name),)), Completed(scalars([1.0])), condition=KnownCondition(answer))
    assert rows(target, queue) == {"a.weight:gradient": 1.0}


def test_a_step_may_hold_nothing() -> None:
    target, queue = recorder()
    target.add(Group.of((gradient("a"),)), Completed(scalars([1.0])), condition=KnownCondition(False))
    assert rows(target, queue) == {}


def test_of_awaited_and_logged_numbers_the_programs_own_wins() -> None:
    target, queue = recorder()
    target.awaited_scalar("norm", Completed(scalars([1.0])), derived=True)
    target.scalar("norm", 2.0)
    target.awaited_scalar("norm", Completed(scalars([3.0])), derived=True)
    target.awaited_scalar("other", Completed(scalars([4.0])), condition=KnownCondition(True))
    target.awaited_scalar("never", Completed(scalars([5.0])), condition=KnownCondition(False))
    assert rows(target, queue) == {"norm": 2.0, "other": 4.0}
