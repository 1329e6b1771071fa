"""Rounds of the plain training and of each variant by turns: plain, variant, plain, variant, …, each in a process of its own.

Two processes of one program can differ by several percent for as long as they live, by where their memory lies. All processes are therefore
started more than once, and the plain training runs in two of them: ``plain_again`` shows the noise.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.frameworks import process
from benchmarks.frameworks.process import Outcome
from benchmarks.frameworks.training import RECORDED
from benchmarks.frameworks.workloads import WORKLOADS

PLAIN, AGAIN = "plain", "plain_again"
_DENSE_VARIANTS = frozenset({AGAIN, "defaults"})
"""Those that train the dense steps before the rounds that count."""
DENSE_STEPS = 100
"""So many steps the overhead budget measures densely first."""
_DRAIN = 3.0
"""More than the writer's longest flush interval with one worker, 2.05 s."""
_DRAIN_QUICK = 1.5


@dataclass(frozen=True)
class Plan:
    """How often a workload is measured.

    Attributes:
        launches: of all processes.
        rounds: of each variant in a launch, after those of the dense steps.
        is_quick: whether the writer gets less time behind a round.
    """

    launches: int
    rounds: int
    is_quick: bool = False


@dataclass
class VariantSeries:
    """What one variant cost, over all launches.

    Attributes:
        first: CPU seconds of the first call, which compiles; by launch.
        pairs: CPU seconds of a round and of the plain round before it.
        dense_pairs: the same of the rounds with dense steps.
        outcomes: by launch.
        missing: why there is nothing; empty where there is.
    """

    first: list[float] = field(default_factory=list)
    pairs: list[tuple[float, float]] = field(default_factory=list)
    dense_pairs: list[tuple[float, float]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    missing: str = ""

    def ratios(self, *, dense: bool = False) -> list[float]:
        """Of each round, its CPU time over that of the plain round before it."""
        return [own / plain for own, plain in (self.dense_pairs if dense else self.pairs)]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios())

    @property
    def least(self) -> float:
        """The least round over the least plain round."""
        return min(own for own, _ in self.pairs) / min(plain for _, plain in self.pairs)


class _FailedError(Exception):
    """A process failed; the message is its traceback."""


@dataclass
class _Process:
    """A process that trains, and the way to it."""

    variant: str
    process: BaseProcess
    connection: Connection
    drain: float
    is_draining: bool = False
    last: list[float] = field(default_factory=list)
    """The cost of the rounds so far."""

    def settle(self) -> None:
        """Take what the last round cost, if that is still on its way."""
        if self.is_draining:
            self.last.append(self._receive())
            self.is_draining = False

    def go(self, steps: int) -> None:
        """Let it do a round, and wait until its steps are done."""
        self.settle()
        self.connection.send((steps, self.drain))
        self._receive()
        self.is_draining = True

    def end(self) -> Outcome:
        """Let it end."""
        self.settle()
        self.connection.send((0, 0.0))
        outcome: Outcome = self.connection.recv()
        return outcome

    def _receive(self) -> Any:
        try:
            received = self.connection.recv()
        except EOFError as error:
            raise _FailedError(f"{self.variant}: its process ended") from error
        if isinstance(received, Outcome):
            raise _FailedError(f"{self.variant}: {received.fault}")
        return received


def measure(workload: str, plan: Plan) -> dict[str, VariantSeries]:
    """All variants of a workload."""
    found = {name: VariantSeries() for name in (PLAIN, *WORKLOADS[workload].variants)}
    for launch in range(plan.launches):
        _launch(workload, plan, random.Random(launch), found)
    return found


def _launch(workload: str, plan: Plan, order: random.Random, found: dict[str, VariantSeries]) -> None:
    chosen = WORKLOADS[workload]
    dense = 0 if plan.is_quick else -(-DENSE_STEPS // chosen.steps)
    names = [name for name, series in found.items() if not series.missing]
    drain = _DRAIN_QUICK if plan.is_quick else _DRAIN
    with tempfile.TemporaryDirectory() as folder, _processes(workload, names, folder, drain) as processes:
        plain = processes.pop(PLAIN)
        for each in (plain, *processes.values()):
            with _noting(found, each.variant):
                each.go(chosen.first)
                each.settle()
                found[each.variant].first.append(each.last[-1])
        for number in range(dense + plan.rounds):
            turns = [
                each
                for name, each in processes.items()
                if not found[name].missing and (number >= dense or name in _DENSE_VARIANTS)
            ]
            order.shuffle(turns)
            pairs: list[tuple[_Process, int, int]] = []
            for each in turns:
                plain.go(chosen.steps)
                with _noting(found, each.variant):
                    each.go(chosen.steps)
                    # Their costs are the next ones; a drain may still be going on.
                    pairs.append((each, len(each.last), len(plain.last)))
            plain.settle()
            for each, own, before in pairs:
                with _noting(found, each.variant):
                    each.settle()
                    series = found[each.variant]
                    kind = series.dense_pairs if number < dense else series.pairs
                    kind.append((each.last[own], plain.last[before]))
        for each in (plain, *processes.values()):
            if not found[each.variant].missing:
                outcome = each.end()
                found[each.variant].outcomes.append(outcome)
                found[each.variant].missing = outcome.fault


@contextlib.contextmanager
def _noting(found: dict[str, VariantSeries], variant: str) -> Iterator[None]:
    try:
        yield
    except _FailedError as error:
        if variant == PLAIN:
            raise
        found[variant].missing = str(error)


@contextlib.contextmanager
def _processes(workload: str, names: list[str], folder: str, drain: float) -> Iterator[dict[str, _Process]]:
    """A process for each variant. Frameworks start threads as they are imported, so that none is forked."""
    context = multiprocessing.get_context("spawn")
    core = min(os.sched_getaffinity(0))
    processes: dict[str, _Process] = {}
    try:
        for name in names:
            here, there = context.Pipe()
            own = tempfile.mkdtemp(dir=folder)
            child = context.Process(target=process.run, args=(there, workload, name, own, core))
            child.start()
            there.close()
            writes = name in RECORDED or name == "tensorboard"
            processes[name] = _Process(name, child, here, drain if writes else 0.0)
            if failure := here.recv():
                raise RuntimeError(f"{workload}/{name}: {failure}")
        yield processes
    finally:
        for each in processes.values():
            each.connection.close()
            each.process.join(30)
            each.process.kill()


def equal_losses(found: dict[str, VariantSeries], variant: str) -> bool | None:
    """Whether the losses of a variant are those of the second plain training, bit by bit; None if there is nothing to compare.

    The last weights are compared as well if both have trained as many steps.
    """
    pairs = list(zip(found[variant].outcomes, found[AGAIN].outcomes, strict=False))
    if not pairs:
        return None
    return all(
        own.losses == plain.losses[: len(own.losses)]
        and (own.weights == plain.weights or len(own.losses) < len(plain.losses))
        for own, plain in pairs
    )


def losses_of(found: dict[str, VariantSeries]) -> int:
    """Number of losses that are compared."""
    return sum(len(outcome.losses) for outcome in itertools.chain(found[AGAIN].outcomes))
