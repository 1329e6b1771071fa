"""System rows: a thread that samples the process and its machine twice a second, and step times from the training thread.

Every rank samples itself; the first rank of a machine also samples the machine. Rows are attached when a step is handed over, and carry its
number. They are therefore never ahead of the step's own rows or behind the rows that end it, and need no segment of their own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from watchstep.capture.config import SystemSampling
from watchstep.capture.health import RecorderHealth
from watchstep.capture.identity import Identity
from watchstep.capture.system.sources import (
    DataWorkers,
    FigureSource,
    Gpus,
    NodeCpu,
    NodeDisks,
    NodeMemory,
    NodeNetwork,
    Process,
    driver_is_there,
    seconds_before_recording,
    visible_count,
)
from watchstep.format.statistics import StatisticsBatch, merge_rows, scalars
from watchstep.format.system_figures import DATA_WAIT, INITIALIZATION_SECONDS, STEP_SECONDS
from watchstep.format.tensors import SYSTEM, TensorInfo

_MOST = 65_536  # samples that wait to be taken; of steps so short, some are enough


class StepTimes:
    """Told when an update ends and when a forward pass begins.

    Between the two a program fetches data, and does whatever else it does there: a checkpoint, `loss.item()`, which waits
    for a device.

    Attributes:
        first: when the first update ended, by the clock; None before.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.first: float | None = None
        self._clock = clock
        self._ended = 0.0
        self._wait: float | None = None
        self._is_between = False
        self._is_mixed = False
        self._seconds: list[float] = []
        self._waits: list[float] = []

    def finished(self) -> None:
        """An update has ended, and its step with it."""
        now = self._clock()
        if self.first is None:
            self.first = now
        elif not self._is_mixed and len(self._seconds) < _MOST and now > self._ended:
            seconds = now - self._ended
            self._seconds.append(seconds)
            if self._wait is not None:
                self._waits.append(self._wait / seconds)
        self._ended, self._wait = now, None
        self._is_between, self._is_mixed = True, False

    def forward(self) -> None:
        """A forward pass of training begins; the first one after an update ends the wait."""
        if self._is_between:
            self._is_between = False
            self._wait = self._clock() - self._ended

    def other_mode(self) -> None:
        """The program evaluates: how long this step takes says nothing of the others."""
        self._is_mixed = True

    def take(self) -> tuple[list[float], list[float]]:
        """Seconds of each step, and the shares that were waited; forgotten here. Called from another thread."""
        seconds, self._seconds = self._seconds, []
        waits, self._waits = self._waits, []
        return seconds, waits


@dataclass(frozen=True)
class Sampled:
    """Rows of samples.

    Attributes:
        tensors: what each row is of.
        statistics: of its samples.
        time_ns: when the last was taken, nanoseconds since the epoch.
    """

    tensors: tuple[TensorInfo, ...]
    statistics: StatisticsBatch
    time_ns: int

    def with_later(self, later: Sampled) -> Sampled:
        """Both as one."""
        place = {info: row for row, info in enumerate(dict.fromkeys((*self.tensors, *later.tensors)))}
        group = np.array([place[info] for info in (*self.tensors, *later.tensors)], np.intp)
        both = StatisticsBatch.concatenate([self.statistics, later.statistics])
        return Sampled(tuple(place), merge_rows(both, group, len(place)), later.time_ns)


class Waiting:
    """The rows that no step has taken along yet. One thread gives, one takes, and neither waits for the other."""

    def __init__(self) -> None:
        self._rows: deque[Sampled] = deque()

    def give(self, rows: Sampled) -> None:
        """Rows for the next step; merged with those that wait, so that there are never more for a step that lasts."""
        with contextlib.suppress(IndexError):  # none waits
            rows = self._rows.pop().with_later(rows)
        self._rows.append(rows)

    def take(self) -> Sampled | None:
        """What waits; None where nothing does."""
        if not self._rows:
            return None
        try:
            return self._rows.popleft()
        except IndexError:  # it was taken back a moment ago, and is given again
            return None


@dataclass(frozen=True)
class Alongside:
    """Both ways.

    Attributes:
        times: from the training thread.
        rows: to it.
    """

    times: StepTimes = field(default_factory=StepTimes)
    rows: Waiting = field(default_factory=Waiting)


def info_of(name: str) -> TensorInfo:
    """What is known of a figure of the system."""
    return TensorInfo(name, (SYSTEM,), "system", dtype="float64")


class Samples:
    """By name, in the order in which they came."""

    def __init__(self) -> None:
        self._held: dict[str, list[float]] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """One sample of each."""
        for name, value in figures.items():
            self._held.setdefault(name, []).append(value)

    def add_all(self, name: str, values: Iterable[float]) -> None:
        """Several of one figure."""
        self._held.setdefault(name, []).extend(values)

    def as_rows(self) -> Sampled | None:
        """A row for each figure that has samples, which are forgotten; None where none has."""
        samples, self._held = {name: values for name, values in self._held.items() if values}, {}
        if not samples:
            return None
        group = np.repeat(np.arange(len(samples)), [len(values) for values in samples.values()])
        every = scalars([value for values in samples.values() for value in values])
        return Sampled(tuple(map(info_of, samples)), merge_rows(every, group, len(samples)), time.time_ns())


_OF_PROCESS: tuple[Callable[[], FigureSource], ...] = (Process, DataWorkers)
_OF_NODE: tuple[Callable[[], FigureSource], ...] = (NodeCpu, NodeMemory, NodeDisks, NodeNetwork)


def opened(identity: Identity, health: RecorderHealth, *, gpus: bool) -> list[FigureSource]:
    """What can be sampled here; health is told of the rest.

    Args:
        identity: of this rank.
        health: gets a note for each kind of figures that cannot be had.
        gpus: whether GPUs are wanted.
    """
    kinds = list(_OF_PROCESS)
    if identity.local_rank == 0:
        kinds += _OF_NODE
    if sys.platform != "linux":
        health.note(
            "system", f"processor, memory and disks are not sampled on {sys.platform}: it has no /proc"
        )
        kinds = []
    if gpus and driver_is_there() and _samples_gpus(identity):
        kinds.append(Gpus)
    sources = []
    for kind in kinds:
        try:
            sources.append(kind())
        except (OSError, ValueError, LookupError) as error:
            health.note(f"system: {kind.__name__}", f"not sampled: {type(error).__name__}: {error}"[:300])
        except ImportError:
            health.note("system: Gpus", "not sampled: install watchstep[gpu]")
    return sources


def _samples_gpus(identity: Identity) -> bool:
    """Whether they are this rank's to sample: each rank's own where it is shown fewer than there are ranks."""
    shown = visible_count()
    return identity.local_rank == 0 or (shown is not None and shown < identity.local_size)


_SHARE_BEFORE = 0.2  # of a row's time: a program that ends at once is not looked at at all
_CLOSING_SECONDS = 1.0


class Sampler:
    """Samples until it is closed, and makes a row of each figure's samples every few seconds.

    A recording that is shorter than that has no such rows; what is left at the end of a longer one becomes its last.
    """

    def __init__(
        self,
        settings: SystemSampling,
        alongside: Alongside,
        identity: Identity,
        health: RecorderHealth,
        cost: Callable[[float], None] | None = None,
    ) -> None:
        """Not begun.

        Args:
            settings: how often.
            alongside: where rows go, and step times come from.
            identity: of this rank: the first of a machine samples the machine.
            health: told what cannot be sampled.
            cost: told the processor time that each sample took, in seconds.
        """
        self._settings = settings
        self._alongside = alongside
        self._identity = identity
        self._health = health
        self._cost = cost
        self._samples = Samples()
        self._sources: list[FigureSource] = []
        self._age: float | None = None
        self._began = time.perf_counter()
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchstep-system", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Give the last rows, and end. A forked child has nothing to end: the thread is its parent's."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join(_CLOSING_SECONDS)

    def _work(self) -> None:
        if self._stop.wait(_SHARE_BEFORE * self._settings.row_seconds):
            return
        try:
            self._begin()
            self._go_on()
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach the program
            self._health.fault("system", error)
        for source in self._sources:
            try:
                source.close()
            except OSError as error:
                self._health.fault("system", error)

    def _begin(self) -> None:
        began = time.thread_time()
        self._sources = opened(self._identity, self._health, gpus=self._settings.gpus)
        self._age = _age(self._began)
        self._report(began)

    def _go_on(self) -> None:
        last, due = time.perf_counter(), self._began + self._settings.row_seconds
        is_over, cost = False, 0.0
        while not is_over:
            is_over = self._stop.wait(max(self._settings.seconds, cost / self._settings.share))
            began, now = time.thread_time(), time.perf_counter()
            self._sample(now - last)
            last, cost = now, 0.8 * cost + 0.2 * (time.thread_time() - began)
            if now >= due or (is_over and now >= self._began + self._settings.row_seconds):
                self._give()
                due = now + self._settings.row_seconds
            self._report(began)

    def _sample(self, seconds: float) -> None:
        for source in list(self._sources):
            try:
                self._samples.add(source.sample(seconds))
            except (OSError, ValueError, LookupError) as error:
                self._sources.remove(source)
                self._health.note(
                    f"system: {type(source).__name__}",
                    f"not sampled any more: {type(error).__name__}: {error}"[:300],
                )

    def _give(self) -> None:
        times = self._alongside.times
        seconds, waits = times.take()
        self._samples.add_all(STEP_SECONDS, seconds)
        self._samples.add_all(DATA_WAIT, waits)
        if self._age is not None and times.first is not None:
            self._samples.add({INITIALIZATION_SECONDS: self._age + times.first - self._began})
            self._age = None
        rows = self._samples.as_rows()
        if rows is not None:
            self._alongside.rows.give(rows)

    def _report(self, began: float) -> None:
        if self._cost is not None:
            self._cost(time.thread_time() - began)


def _age(began: float) -> float | None:
    """How old the process was when the recording began, by its own clock; None where that is no part of a training."""
    age = seconds_before_recording()
    return None if age is None else age - (time.perf_counter() - began)
