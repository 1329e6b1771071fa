"""Rounds of several variants of one training in turn, so that what else the machine does meets all of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from benchmarks.capture import child
from benchmarks.capture.child import Farewell, Sample
from benchmarks.capture.models import WORKLOADS
from benchmarks.capture.variants import VARIANTS

DRAIN_SECONDS = 3.0
"""More than the writer's longest flush interval with one worker, 2.05 s."""
_DRAIN_QUICK = 1.5


@dataclass
class Series:
    """The rounds of one variant."""

    samples: list[Sample] = field(default_factory=list)
    farewell: Farewell | None = None
    missing: str = ""

    def threads(self, period: int) -> list[float]:
        """CPU seconds of the training thread a step, of each so many steps one after the other; of all if too few."""
        steps = [seconds for sample in self.samples for seconds in sample.thread]
        period = min(period, len(steps))
        starts = range(0, len(steps) - period + 1, period)
        return [statistics.fmean(steps[start : start + period]) for start in starts]

    def least(self, period: int) -> float:
        """CPU seconds of a step: the training thread's least so many, and the least round of all that is behind it."""
        return min(self.threads(period)) + min(sample.rest for sample in self.samples)

    def due_steps(self, period: int) -> float:
        """The training thread's time with one due step in a period over its time without, within one process.

        Two processes differ by more on a shared machine. The due step is the one of a period that takes longest, by the median over all
        periods; the median of the others is the time without.
        """
        by_place = [
            statistics.median(
                step
                for sample in self.samples
                for number, step in enumerate(sample.thread)
                if number % period == place
            )
            for place in range(period)
        ]
        due = max(by_place)
        by_place.remove(due)
        without = statistics.median(by_place)
        return 1 + (due - without) / (period * without)

    @property
    def mean(self) -> float:
        """CPU seconds of a step, over all rounds."""
        return statistics.fmean(self.threads(1)) + statistics.fmean(sample.rest for sample in self.samples)

    @property
    def spread(self) -> float:
        """Median over least of the training thread's time."""
        return statistics.median(self.threads(1)) / min(self.threads(1))


@dataclass
class _Member:
    """A child process and the way to it."""

    variant: str
    steps: int
    process: BaseProcess
    connection: Connection
    series: Series = field(default_factory=Series)
    draining: bool = False

    def settle(self) -> None:
        """Take what the last round cost, if that is still on its way."""
        if self.draining:
            self.series.samples.append(self.connection.recv())
            self.draining = False

    def go(self, steps: int) -> None:
        """Let it do a round, and wait until its training thread is done."""
        self.settle()
        self.connection.send(steps)
        self.connection.recv()
        self.draining = True


def measure(workload: str, variants: Sequence[str], rounds: int, *, quick: bool) -> dict[str, Series]:
    """All variants of one training, interleaved in an order that changes each round.

    Before the first round a variant that adapts gets the training's warm-up; the others a step each.
    """
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, _members(workload, variants, folder, quick) as members:
        ready = [member for member in members if not member.series.missing]
        for member in ready:
            adapts = VARIANTS[member.variant].mean and not quick
            member.go(WORKLOADS[workload].warm_steps if adapts else 2)
            member.settle()
            member.series.samples.clear()
        for number in range(rounds):
            order.shuffle(ready)
            for member in ready:
                if number < _rounds_of(member.variant, rounds):
                    member.go(member.steps)
        for member in ready:
            member.settle()
            member.connection.send(0)
            member.series.farewell = member.connection.recv()
            member.series.missing = member.series.farewell.fault
        return {member.variant: member.series for member in members}


def _rounds_of(variant: str, rounds: int) -> int:
    """Peers cost so much more that few rounds tell it; long rounds need not be as many."""
    return (
        min(rounds, 5)
        if VARIANTS[variant].peer
        else min(rounds, 8)
        if VARIANTS[variant].period > 1
        else rounds
    )


@contextlib.contextmanager
def _members(workload: str, variants: Sequence[str], folder: str, quick: bool) -> Iterator[list[_Member]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.capture.child"])
    members = []
    for variant in variants:
        here, there = context.Pipe()
        drain = _DRAIN_QUICK if quick else DRAIN_SECONDS
        own = tempfile.mkdtemp(dir=folder)
        process = context.Process(target=child.run, args=(there, workload, variant, own, drain), daemon=False)
        process.start()
        there.close()
        steps = _round_steps(WORKLOADS[workload].steps, VARIANTS[variant].period)
        members.append(_Member(variant, steps, process, here))
    try:
        for member in members:
            member.series.missing = member.connection.recv() or ""
        yield members
    finally:
        for member in members:
            member.connection.close()
            member.process.join(30)
            member.process.kill()


def _round_steps(steps: int, period: int) -> int:
    """The steps of a round, up to the next multiple of the period."""
    return -(-steps // period) * period
