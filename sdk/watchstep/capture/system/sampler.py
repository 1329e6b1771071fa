"""System rows: a thread that samples the process and its machine twice a second, and step times from the training thread.

Every rank samples itself; the first rank of a machine also samples the machine. Rows are attached when a step is handed over, and have its
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

_MOST = 65_536  # maximum number of pending samples; a part of such short steps is sufficient


class StepTimes:
    """Measures step times from the ends of updates and starts of forward passes.

    Between the two a program fetches data, and does other work: a checkpoint, `loss.item()`, which waits
    for a device.

    Attributes:
        first: Time of the first update's end by the clock; None before.
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
        """Record the end of an update and its step."""
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
        """Record the start of a training forward pass. The first one after an update ends the wait."""
        if self._is_between:
            self._is_between = False
            self._wait = self._clock() - self._ended

    def other_mode(self) -> None:
        """Exclude the current step, because the program evaluates."""
        self._is_mixed = True

    def take(self) -> tuple[list[float], list[float]]:
        """Return and clear the seconds of each step and the waited shares. Called from another thread."""
        seconds, self._seconds = self._seconds, []
        waits, self._waits = self._waits, []
        return seconds, waits


@dataclass(frozen=True)
class Sampled:
    """Rows of samples.

    Attributes:
        tensors: Tensor of each row.
        statistics: Statistics of its samples.
        time_ns: Time of the last sample in nanoseconds since the epoch.
    """

    tensors: tuple[TensorInfo, ...]
    statistics: StatisticsBatch
    time_ns: int

    def with_later(self, later: Sampled) -> Sampled:
        """Return both merged."""
        place = {info: row for row, info in enumerate(dict.fromkeys((*self.tensors, *later.tensors)))}
        group = np.array([place[info] for info in (*self.tensors, *later.tensors)], np.intp)
        both = StatisticsBatch.concatenate([self.statistics, later.statistics])
        return Sampled(tuple(place), merge_rows(both, group, len(place)), later.time_ns)


class Waiting:
    """Rows that are not attached to a step yet. One thread adds, another takes, and neither waits for the other."""

    def __init__(self) -> None:
        self._rows: deque[Sampled] = deque()

    def give(self, rows: Sampled) -> None:
        """Add rows for the next step. They are merged with pending rows, so that their number does not grow during a long step."""
        with contextlib.suppress(IndexError):  # none is pending
            rows = self._rows.pop().with_later(rows)
        self._rows.append(rows)

    def take(self) -> Sampled | None:
        """Return the pending rows, or None."""
        if not self._rows:
            return None
        try:
            return self._rows.popleft()
        except IndexError:  # it was just removed, and is added again
            return None


@dataclass(frozen=True)
class Alongside:
    """Exchange between the training thread and the sampler.

    Attributes:
        times: Step times from the training thread.
        rows: Rows to the training thread.
    """

    times: StepTimes = field(default_factory=StepTimes)
    rows: Waiting = field(default_factory=Waiting)


def info_of(name: str) -> TensorInfo:
    """Return the tensor info of a system figure."""
    return TensorInfo(name, (SYSTEM,), "system", dtype="float64")


class Samples:
    """Samples by name, in the order of arrival."""

    def __init__(self) -> None:
        self._held: dict[str, list[float]] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """Add one sample of each figure."""
        for name, value in figures.items():
            self._held.setdefault(name, []).append(value)

    def add_all(self, name: str, values: Iterable[float]) -> None:
        """Add several samples of one figure."""
        self._held.setdefault(name, []).extend(values)

    def as_rows(self) -> Sampled | None:
        """Return a row for each figure with samples, and clear them; None without samples."""
        samples, self._held = {name: values for name, values in self._held.items() if values}, {}
        if not samples:
            return None
        group = np.repeat(np.arange(len(samples)), [len(values) for values in samples.values()])
        every = scalars([value for values in samples.values() for value in values])
        return Sampled(tuple(map(info_of, samples)), merge_rows(every, group, len(samples)), time.time_ns())


_OF_PROCESS: tuple[Callable[[], FigureSource], ...] = (Process, DataWorkers)
_OF_NODE: tuple[Callable[[], FigureSource], ...] = (NodeCpu, NodeMemory, NodeDisks, NodeNetwork)


def opened(identity: Identity, health: RecorderHealth, *, gpus: bool) -> list[FigureSource]:
    """Return the available sources. Unavailable ones are noted in the health.

    Args:
        identity: Identity of this rank.
        health: Receives a note for each kind of unavailable figures.
        gpus: Whether to sample GPUs.
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
    """Return whether this rank samples GPUs: each rank its own if fewer are visible than there are ranks."""
    shown = visible_count()
    return identity.local_rank == 0 or (shown is not None and shown < identity.local_size)


_SHARE_BEFORE = 0.2  # share of a row's time: a program that ends at once is not sampled
_CLOSING_SECONDS = 1.0


class Sampler:
    """Samples until it is closed, and makes a row of each figure's samples every few seconds.

    A shorter recording has no such rows. The remaining samples at the end of a longer one become its last row.
    """

    def __init__(
        self,
        settings: SystemSampling,
        alongside: Alongside,
        identity: Identity,
        health: RecorderHealth,
        cost: Callable[[float], None] | None = None,
    ) -> None:
        """Create a sampler without starting it.

        Args:
            settings: Sampling settings.
            alongside: Exchange of rows and step times with the training thread.
            identity: Identity of this rank. The first rank of a machine samples the machine.
            health: Receives notes about unavailable figures.
            cost: Called with the processor time of each sample in seconds.
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
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Add the last rows, and end the thread. In a forked child this does nothing, because the thread is in the parent."""
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
        except Exception as error:  # noqa: BLE001 - errors of the recorder never reach the program
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
    """Return the age of the process at the start of the recording by its own clock; None if that is not part of a training."""
    age = seconds_before_recording()
    return None if age is None else age - (time.perf_counter() - began)
