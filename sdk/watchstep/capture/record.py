"""Records: the statistics of a step on their way to the writer, and the scalars of the step.

Records: the statistics of a step on their way to the writer, through a queue bounded by bytes that never blocks training.

Scalars of the current step: all recorded values of a loss, the last value of a metric, and losses that leave their range.

A loss that is recorded several times in a step, for micro-batches or batches of an evaluation, becomes one row with
their statistics: ``mean`` is the mean by batch, ``count`` the number of batches; NaN and infinite batches stay in the
counts. When a loss leaves the range that it had, the steps that follow are measured completely.

An update ends an evaluation. Where a step has an evaluation before its update and another after it, the later one is
recorded and the earlier one is counted in health: their weights differ, and a mean of both would describe neither.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from watchstep.capture.config import counts_on, is_summed
from watchstep.capture.health import RecorderHealth
from watchstep.format.block import Block, Places, concatenate, sort_key
from watchstep.format.statistics import Floats, StatisticsBatch, merge_rows, scalars
from watchstep.format.tensors import LOSSES, METRICS, MODES, Mode, Placement, TensorInfo
from watchstep.kernels.measurement import Completed, Measurement, Rescaled

_ROW_BYTES = 700
"""What one row of statistics is taken to need, with a histogram of about 40 bins, while that is not known."""

_ROW_BYTES_BESIDES = 100
"""What it needs besides its statistics: its step, placement, probes."""

_COUNTED_ON = frozenset(
    {
        "examples",
        "correct",
        "confused",
        "confused_with",
        "all_examples",
        "all_correct",
        "all_predicted",
        "all_mistaken",
        "all_mistaken_for",
    }
)
"""Probes that count on from pass to pass: the last of a step has taken in the others."""

_RECORD_BYTES = 1500
"""What a record takes besides: Python's objects, and the heads of arrays."""


@dataclass(frozen=True)
class Group:
    """Tensors that are measured together, and what is known of them.

    Attributes:
        tensors: in the order of the measurement's rows.
        places: the placement of each.
    """

    tensors: tuple[TensorInfo, ...]
    places: tuple[Placement, ...]

    @classmethod
    def of(cls, tensors: tuple[TensorInfo, ...], place: Placement | None = None) -> Group:
        """Tensors of one placement; whole and on this worker alone where none is given."""
        return cls(tensors, (place or Placement(),) * len(tensors))


class Probe(Protocol):
    """Figures besides the row, that may still be on their way from a device."""

    def collect(self) -> dict[str, Floats]:
        """Columns by name, float64, one value for each tensor of the group; NaN where a tensor has none."""
        ...


class Condition(Protocol):
    """Whether something measured counts, where that is not known when it is measured."""

    def holds(self) -> bool:
        """The answer; waits for the device. Called off the training thread."""
        ...


@dataclass(frozen=True)
class Record:
    """Statistics of a group at one step in one mode.

    Attributes:
        step: the step.
        mode: the mode.
        worker: the rank.
        time_ns: nanoseconds since the epoch.
        group: the tensors.
        measurement: their statistics.
        probes: figures besides.
        condition: where it does not hold, the record is left out.
        update: the number of the update that it was measured for, from 1; 0 where it belongs to none.
    """

    step: int
    mode: Mode
    worker: int
    time_ns: int
    group: Group
    measurement: Measurement
    probes: tuple[Probe, ...] = ()
    condition: Condition | None = None
    update: int = 0

    @property
    def bytes(self) -> int:
        """About how much memory it holds."""
        rows = len(self.group.tensors)
        available: int | None = getattr(self.measurement, "bytes", None)  # of a device's it is not known yet
        statistics = _ROW_BYTES * rows if available is None else _ROW_BYTES_BESIDES * rows + available
        return _RECORD_BYTES + statistics


def to_block(record: Record) -> Block:
    """A record's rows. Waits for the device."""
    statistics = record.measurement.collect()
    rows = len(record.group.tensors)
    if len(statistics) != rows:
        raise ValueError(f"the kernel gave {len(statistics)} rows for {rows} tensors")
    return Block(
        step=np.full(rows, record.step, np.int64),
        mode=np.full(rows, MODES.index(record.mode), np.int8),
        worker=np.full(rows, record.worker, np.int32),
        time_ns=np.full(rows, record.time_ns, np.int64),
        tensor=np.arange(rows, dtype=np.int32),
        catalogue=record.group.tensors,
        places=Places.of(list(record.group.places)),
        statistics=statistics,
        probes={name: column for probe in record.probes for name, column in probe.collect().items()},
    )


def merge_repeats(block: Block) -> Block:
    """Merge rows of one tensor, step, mode and worker: micro-batches, and modules that are called several times.

    Of a probe the smallest value stays: channels are counted over all passes of a step so far, and only get fewer. Of those
    that count on the last stays, and sums add up.
    """
    key = sort_key(block.step, block.mode, block.worker, block.tensor, block.places.shard_index)
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    if len(first) == len(block):
        return block.ordered()
    merged = block.take(first)
    return Block(
        step=merged.step,
        mode=merged.mode,
        worker=merged.worker,
        time_ns=merged.time_ns,
        tensor=merged.tensor,
        catalogue=block.catalogue,
        places=merged.places,
        statistics=merge_rows(block.statistics, group, len(first)),
        probes={name: _merge_of(name)(column, group, len(first)) for name, column in block.probes.items()},
    ).ordered()


def _merge_of(probe: str) -> Callable[[Floats, NDArray[np.intp], int], Floats]:
    if is_summed(probe):
        return _sum
    return _last if probe in _COUNTED_ON or counts_on(probe) else _least


def _sum(column: Floats, group: NDArray[np.intp], groups: int) -> Floats:
    measured = ~np.isnan(column)
    total = np.full(groups, np.nan)
    total[group[measured]] = 0.0
    np.add.at(total, group[measured], column[measured])
    return total


def _least(column: Floats, group: NDArray[np.intp], groups: int) -> Floats:
    least = np.full(groups, np.nan)
    np.fmin.at(least, group, column)
    return least


def _last(column: Floats, group: NDArray[np.intp], groups: int) -> Floats:
    last, previous = np.full(groups, np.nan), ~np.isnan(column)
    last[group[previous]] = column[previous]  # of one place the last assignment stands
    return last


def join(records: list[Record]) -> Block:
    """All records whose condition holds as one block in canonical order."""
    recorded = [record for record in records if record.condition is None or record.condition.holds()]
    return (
        merge_repeats(concatenate([to_block(record) for record in recorded])) if recorded else Block.empty()
    )


_URGENT_SECONDS = 5.0


@dataclass(frozen=True)
class FinishedStep:
    """All that was recorded of one step."""

    step: int
    records: tuple[Record, ...]

    @property
    def bytes(self) -> int:
        """About how much memory it holds."""
        return sum(record.bytes for record in self.records)

    @property
    def rows(self) -> int:
        """Rows of statistics in it."""
        return sum(len(record.group.tensors) for record in self.records)


class BoundedQueue:
    """Finished steps up to a number of bytes. One producer, one consumer.

    Without a lock: a signal that comes while the training thread hands something over must find none held.

    Attributes:
        wake: set when the consumer should look at once.
        pressing: what is in here shall be written at once. Set by the producer, taken back by the consumer.
        urgent_at: when something urgent was last handed over, by the monotonic clock.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[tuple[int, FinishedStep]] = deque()
        self._offered = 0  # bytes; written by the producer alone
        self._taken = 0  # bytes; written by the consumer alone
        self.wake = threading.Event()
        self.pressing = False
        self.urgent_at = float("-inf")

    def is_urgent(self) -> bool:
        """Whether something urgent was handed over a moment ago: a stop may follow."""
        return time.monotonic() - self.urgent_at < _URGENT_SECONDS

    @property
    def room(self) -> int:
        """Bytes that are left."""
        return self._limit - (self._offered - self._taken)

    def offer(self, item: FinishedStep, *, urgent: bool = False) -> bool:
        """Hand an item over; False, and nothing kept, where it would go over the bound."""
        size = item.bytes
        fits = size <= self.room
        if fits:
            self._offered += size
            self._items.append((size, item))
        if urgent:
            self.urgent_at = time.monotonic()
        if urgent or not fits:
            self.press()
        return fits

    def press(self) -> None:
        """Have the consumer write at once."""
        self.pressing = True
        self.wake.set()

    def take(self) -> FinishedStep | None:
        """The oldest item; None where there is none."""
        try:
            size, item = self._items.popleft()
        except IndexError:
            return None
        self._taken += size
        return item


_WINDOW = 64
_FEWEST = 16
_EVERY = 16
"""Losses between two looks at the range; a single loss is compared with one number."""

_DEVIATIONS = 8.0
_RISE = 0.25
_NORMAL = 1.4826
_MOST_SERIES = 32


class LossRange:
    """The range of the last losses of one name: median and median absolute deviation, which do not notice single outliers (Hampel 1974)."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_WINDOW)
        self._until_look = _FEWEST
        self._level = 0.0
        self._unit = 1.0
        self._limit = math.inf

    def excess(self, loss: float) -> float:
        """How far a loss is above the range, in units of the least distance that counts: 1 or more, or 0 within the range.

        The unit is the largest of eight robust standard deviations and a quarter of the level. What is NaN or infinite is no loss of a
        range: the gate sees it.
        """
        if not math.isfinite(loss):
            return 0.0
        excess = (loss - self._level) / self._unit if loss > self._limit else 0.0
        self._last.append(loss)
        self._until_look -= 1
        if not self._until_look:
            self._look()
        return excess

    def _look(self) -> None:
        self._until_look = _EVERY
        middle = len(self._last) // 2
        self._level = sorted(self._last)[middle]
        spread = _NORMAL * sorted(abs(loss - self._level) for loss in self._last)[middle]
        self._unit = max(_DEVIATIONS * spread, _RISE * abs(self._level))
        self._limit = self._level + self._unit if self._unit > 0 else math.inf


class LossOnsets:
    """Asks for bursts of measuring where a training loss leaves its range. On the training thread."""

    def __init__(self, burst: Callable[[float], bool]) -> None:
        """Begin with no losses.

        Args:
            burst: called with the excess of a loss above its range; whether measuring begins because of it.
        """
        self._burst = burst
        self._ranges: dict[tuple[str, bool], LossRange] = {}

    def seen(self, name: str, loss: float, *, derived: bool) -> bool:
        """A training loss; whether everything is measured from now on because of it.

        Args:
            name: of the loss.
            loss: its value.
            derived: it was found at ``backward()``. What the program logs by the same name has a range of its own.
        """
        loss_range = self._ranges.get((name, derived))
        if loss_range is None:
            if len(self._ranges) >= _MOST_SERIES:
                return False
            loss_range = self._ranges[name, derived] = LossRange()
        excess = loss_range.excess(loss)
        return excess > 0 and self._burst(excess)


_MOST_VALUES = 1024
"""Numbers of one name that are kept one by one, in host memory; more are merged."""

_MOST_ON_DEVICE = 256
"""The same on a device, where they are measured together."""

_EVALUATIONS: frozenset[Mode] = frozenset({"eval", "predict"})


class DeviceScalar(Protocol):
    """A number in a device's memory, which is not waited for."""

    def measure(self) -> Measurement:
        """Start to measure it."""
        ...

    def copy(self) -> DeviceScalar:
        """The number as it is now, in memory that the program does not write to."""
        ...

    def measure_all(self, scalars: Sequence[Any]) -> Measurement:
        """Start to measure several as one tensor of so many elements; they are of the same kind as this one."""
        ...


@dataclass
class _Scalar:
    """One name in one mode.

    Attributes:
        info: describes it.
        values: those in host memory that are not merged.
        merged: the statistics of earlier ones, one row.
        measured: those on their way from a device.
        unmeasured: those in a device's memory.
    """

    info: TensorInfo
    values: list[float] = field(default_factory=list)
    merged: StatisticsBatch | None = None
    measured: list[tuple[Measurement, Condition | None]] = field(default_factory=list)
    unmeasured: list[DeviceScalar] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.values.append(value)
        if len(self.values) >= _MOST_VALUES:
            self.merged, self.values = self.statistics(), []

    def add_on_device(self, value: DeviceScalar) -> None:
        if not self.measured:
            self.measured.append((value.measure(), None))
            return
        self.unmeasured.append(value.copy())
        if len(self.unmeasured) >= _MOST_ON_DEVICE:
            self.measure_rest()

    def measure_rest(self) -> None:
        if self.unmeasured:
            self.measured.append((self.unmeasured[0].measure_all(self.unmeasured), None))
            self.unmeasured = []

    def statistics(self) -> StatisticsBatch:
        """Of those in host memory, one row."""
        rows = scalars(self.values)
        if self.merged is not None:
            rows = StatisticsBatch.concatenate([self.merged, rows])
        return rows if len(rows) == 1 else merge_rows(rows, np.zeros(len(rows), np.intp), 1)


class ScalarValues:
    """What was recorded of losses and metrics in the step under way. On the training thread."""

    def __init__(self, health: RecorderHealth) -> None:
        self.onsets: LossOnsets | None = None
        """Is told of each training loss in host memory."""
        self._health = health
        self._scalars: dict[tuple[Mode, str], _Scalar] = {}
        self._before_update: set[tuple[Mode, str]] = set()
        self._groups: dict[tuple[TensorInfo, ...], Group] = {}
        self._functions: dict[tuple[Mode, str], str] = {}

    def add(self, mode: Mode, name: str, value: float, *, derived: bool, replaces: bool) -> None:
        """Record a number.

        Args:
            mode: of the row.
            name: of the row.
            value: the number.
            derived: it was not logged by the program; what the program logs under this name takes its place.
            replaces: it takes the place of what was recorded under this name, also of a loss.
        """
        scalar = self._scalar(mode, name, derived=derived, replaces=replaces)
        if scalar is not None:
            scalar.add(value)
            if self.onsets is not None and mode == "train" and scalar.info.role == "loss":
                self.onsets.seen(name, value, derived=derived)

    def add_on_device(
        self, mode: Mode, name: str, value: DeviceScalar, *, derived: bool, replaces: bool
    ) -> None:
        """Record a number in a device's memory, as `add` does one at hand."""
        scalar = self._scalar(mode, name, derived=derived, replaces=replaces)
        if scalar is not None:
            scalar.add_on_device(value)

    def add_measured(
        self, mode: Mode, name: str, measurement: Measurement, condition: Condition | None, *, derived: bool
    ) -> None:
        """Record a number that is being measured, if a condition holds that is known later; it replaces earlier ones."""
        scalar = self._scalar(mode, name, derived=derived, replaces=True)
        if scalar is not None:
            scalar.measured.append((measurement, condition))

    def note_function(self, mode: Mode, name: str, function: str) -> None:
        """Name the function that computes a loss. The first word counts: a series has one description."""
        self._functions.setdefault((mode, name), function)

    def undivide(self, mode: Mode, name: str, divisor: float) -> None:
        """Multiply what is derived of a name so far by a number; what the program logs is its own."""
        scalar = self._scalars.get((mode, name))
        if scalar is not None and scalar.info.derived and scalar.merged is None:
            scalar.measure_rest()
            scalar.values = [value * divisor for value in scalar.values]
            scalar.measured = [
                (Rescaled(measurement, lambda: 1 / divisor), condition)
                for measurement, condition in scalar.measured
            ]

    def update_done(self) -> None:
        """The weights are others now: evaluations so far are over."""
        if self._scalars:
            self._before_update = {key for key in self._scalars if key[0] in _EVALUATIONS}

    def clear(self) -> None:
        """Another step begins."""
        if self._scalars:
            self._scalars = {}
            self._before_update.clear()

    def rows(self) -> Iterator[tuple[Mode, Group, Measurement, Condition | None]]:
        """The rows of the step so far: those in host memory by mode, the others each by itself."""
        by_mode: dict[Mode, list[_Scalar]] = {}
        for (mode, _), scalar in self._scalars.items():
            scalar.measure_rest()
            for measurement, condition in scalar.measured:
                yield mode, Group.of((scalar.info,)), measurement, condition
            if scalar.values or scalar.merged is not None:
                by_mode.setdefault(mode, []).append(scalar)
        for mode, members in by_mode.items():
            infos = tuple(scalar.info for scalar in members)
            group = self._groups.setdefault(infos, Group.of(infos))
            if all(len(scalar.values) == 1 and scalar.merged is None for scalar in members):
                statistics = scalars([scalar.values[0] for scalar in members])
            else:
                statistics = StatisticsBatch.concatenate([scalar.statistics() for scalar in members])
            yield mode, group, Completed(statistics), None

    def _scalar(self, mode: Mode, name: str, *, derived: bool, replaces: bool) -> _Scalar | None:
        """Where to put a number; None where the program has logged this name itself."""
        key = mode, name
        scalar = self._scalars.get(key)
        if scalar is not None:
            if derived and not scalar.info.derived:
                return None
            if key in self._before_update:
                self._before_update.discard(key)
                self._health.count("replaced_evaluations")
                replaces = True
            if not replaces and derived == scalar.info.derived and scalar.info.role == "loss":
                return scalar
        function = self._functions.setdefault(key, "")
        scalar = self._scalars[key] = _Scalar(scalar_info(name, derived=derived, function=function))
        return scalar


@functools.lru_cache(maxsize=4096)
def scalar_info(name: str, *, derived: bool = False, function: str = "") -> TensorInfo:
    """A loss, if its name says so, or else a metric."""
    loss = "loss" in name.lower()
    return TensorInfo(
        name,
        (LOSSES if loss else METRICS,),
        "loss" if loss else "metric",
        module_type=function if loss else "",
        dtype="float64",
        derived=derived,
    )
