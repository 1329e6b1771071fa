"""Records: the statistics of a step on their way to the writer, through a queue bounded by bytes that never blocks training.

Scalars of the current step are all recorded values of a loss, the last value of a metric, and losses that leave their range.

A loss that is recorded several times in a step, for micro-batches or batches of an evaluation, becomes one row with
their statistics: ``mean`` is the mean over batches, ``count`` the number of batches; NaN and infinite batches are included in the
counts. Batches that are logged with a weight count as that many. When a loss leaves its recent range, the following steps are measured completely.

An update ends an evaluation. If a step has an evaluation before its update and another after it, the later one is
recorded and the earlier one is counted in health: their weights differ, and a mean of both would describe neither.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from watchstep.capture.config import is_cumulative, is_summed
from watchstep.capture.health import RecorderHealth
from watchstep.format.block import Block, Places, concatenate, sort_key
from watchstep.format.statistics import Floats, StatisticsBatch, merge_rows, scalars
from watchstep.format.tensors import LOSSES, METRICS, MODES, Mode, Placement, TensorInfo
from watchstep.kernels.measurement import Completed, Measurement, Repeated, Rescaled

_ROW_BYTES = 700
"""Estimated size of one row of statistics, with a histogram of about 40 bins, while it is unknown."""

_NUMBER_BYTES = 130
"""Size of the statistics of one number."""

_ROW_OVERHEAD_BYTES = 100
"""Size of a row in addition to its statistics: step, placement, probes."""

_CUMULATIVE = frozenset(
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
"""Cumulative probes: the value of a step's last pass includes the others."""

_RECORD_OVERHEAD_BYTES = 1500
"""Size of a record in addition to its rows: Python objects and array headers."""


@dataclass(frozen=True)
class Group:
    """Tensors that are measured together.

    Attributes:
        tensors: descriptions, in the order of the measurement's rows.
        places: the placement of each tensor.
    """

    tensors: tuple[TensorInfo, ...]
    places: tuple[Placement, ...]

    @classmethod
    def of(cls, tensors: tuple[TensorInfo, ...], place: Placement | None = None) -> Group:
        """Return a group with one placement for all tensors; by default whole and on this worker only."""
        return cls(tensors, (place or Placement(),) * len(tensors))


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of one step, one row each. They become statistics outside the training thread, together with those of other steps."""

    values: tuple[float, ...]

    @property
    def nonfinite(self) -> bool | None:
        """Return whether some number is NaN or infinite."""
        return not all(map(math.isfinite, self.values))

    @property
    def bytes(self) -> int:
        """Size of their statistics in memory."""
        return _NUMBER_BYTES * len(self.values)

    def collect(self) -> StatisticsBatch:
        """Return the statistics."""
        return scalars(list(self.values))


class Probe(Protocol):
    """Additional figures, which may still be on their way from a device."""

    def collect(self) -> dict[str, Floats]:
        """Return columns by name: float64, one value per tensor of the group; NaN for tensors without a value."""
        ...


class Condition(Protocol):
    """A condition for recording a measurement, if it is not known at the time of measuring."""

    def is_met(self) -> bool:
        """Whether the condition is met. Waits for the device. Called off the training thread."""
        ...


@dataclass(frozen=True)
class Record:
    """Statistics of a group at one step in one mode.

    Attributes:
        step: the step.
        mode: the mode.
        worker: the rank.
        time_ns: when the tensors were computed, in nanoseconds since the epoch: one time, or that of each tensor.
        group: the tensors.
        measurement: their statistics.
        probes: additional figures.
        condition: the record is dropped unless it is met.
        update: number of the update that it was measured for, from 1; 0 if it belongs to none.
    """

    step: int
    mode: Mode
    worker: int
    time_ns: int | tuple[int, ...]
    group: Group
    measurement: Measurement
    probes: tuple[Probe, ...] = ()
    condition: Condition | None = None
    update: int = 0

    @property
    def bytes(self) -> int:
        """Approximate memory size."""
        rows = len(self.group.tensors)
        available: int | None = getattr(self.measurement, "bytes", None)  # not known yet for a device
        statistics = _ROW_BYTES * rows if available is None else _ROW_OVERHEAD_BYTES * rows + available
        return _RECORD_OVERHEAD_BYTES + statistics


def to_block(record: Record) -> Block:
    """Return a record's rows. Waits for the device."""
    statistics = record.measurement.collect()
    rows = len(record.group.tensors)
    if len(statistics) != rows:
        raise ValueError(f"the kernel returned {len(statistics)} rows for {rows} tensors")
    return Block(
        step=np.full(rows, record.step, np.int64),
        mode=np.full(rows, MODES.index(record.mode), np.int8),
        worker=np.full(rows, record.worker, np.int32),
        time_ns=np.broadcast_to(np.array(record.time_ns, np.int64), rows).copy(),
        tensor=np.arange(rows, dtype=np.int32),
        catalogue=record.group.tensors,
        places=Places.of(list(record.group.places)),
        statistics=statistics,
        probes={name: column for probe in record.probes for name, column in probe.collect().items()},
    )


def merge_repeats(block: Block) -> Block:
    """Merge rows of one tensor, step, mode and worker: micro-batches, and modules that are called several times.

    A probe keeps its smallest value: channels are counted over all passes of a step so far, and their number only decreases.
    Cumulative probes keep the last value, and sums are added.
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
    return _last if probe in _CUMULATIVE or is_cumulative(probe) else _least


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
    last[group[previous]] = column[previous]  # the last assignment to an index remains
    return last


def _to_blocks(records: list[Record]) -> list[Block]:
    """Return the rows of records. Numbers of several steps become one block: most steps have nothing else."""
    numbers: dict[tuple[int, Mode, int], list[Record]] = {}
    others: list[Record | list[Record]] = []
    for record in records:
        if not isinstance(record.measurement, StepNumbers) or record.probes:
            others.append(record)
            continue
        key = id(record.group), record.mode, record.worker
        if key not in numbers:
            others.append(numbers.setdefault(key, []))
        numbers[key].append(record)
    return [_block_of_numbers(entry) if isinstance(entry, list) else to_block(entry) for entry in others]


def _block_of_numbers(records: list[Record]) -> Block:
    """Return the rows of records of numbers of one group, mode and worker."""
    first, rows = records[0], len(records[0].group.tensors)
    values: list[float] = []
    for record in records:
        assert isinstance(record.measurement, StepNumbers)
        values += record.measurement.values
    return Block(
        step=np.repeat(np.array([record.step for record in records], np.int64), rows),
        mode=np.full(len(values), MODES.index(first.mode), np.int8),
        worker=np.full(len(values), first.worker, np.int32),
        time_ns=np.repeat(np.array([record.time_ns for record in records], np.int64), rows),
        tensor=np.tile(np.arange(rows, dtype=np.int32), len(records)),
        catalogue=first.group.tensors,
        places=Places.of(list(first.group.places) * len(records)),
        statistics=scalars(values),
    )


def join(records: list[Record]) -> Block:
    """Concatenate all records with a met condition into one block in canonical order."""
    recorded = [record for record in records if record.condition is None or record.condition.is_met()]
    return merge_repeats(concatenate(_to_blocks(recorded))) if recorded else Block.empty()


_URGENT_SECONDS = 5.0


@dataclass(frozen=True)
class FinishedStep:
    """All records of one step."""

    step: int
    records: tuple[Record, ...]

    @property
    def bytes(self) -> int:
        """Approximate memory size."""
        return sum(record.bytes for record in self.records)

    @property
    def rows(self) -> int:
        """Number of rows of statistics."""
        return sum(len(record.group.tensors) for record in self.records)


class BoundedQueue:
    """A queue of finished steps, bounded by bytes. One producer, one consumer.

    It has no lock, because a signal handler may interrupt the training thread at any point and use the queue as well.

    Attributes:
        wake: set when the consumer should check the queue at once.
        pressing: the contents should be written at once. Set by the producer, cleared by the consumer.
        urgent_at: when something urgent was last added, by the monotonic clock.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[tuple[int, FinishedStep]] = deque()
        self._offered = 0  # bytes; written by the producer only
        self._taken = 0  # bytes; written by the consumer only
        self.wake = threading.Event()
        self.pressing = False
        self.urgent_at = float("-inf")

    def is_urgent(self) -> bool:
        """Whether something urgent was added recently, so that a stop may follow."""
        return time.monotonic() - self.urgent_at < _URGENT_SECONDS

    @property
    def room(self) -> int:
        """Remaining bytes."""
        return self._limit - (self._offered - self._taken)

    @property
    def is_empty(self) -> bool:
        """Whether no item waits."""
        return not self._items

    def offer(self, item: FinishedStep, *, urgent: bool = False) -> bool:
        """Add an item. Returns False, and drops the item, if it exceeds the bound."""
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
        """Request the consumer to write at once."""
        self.pressing = True
        self.wake.set()

    def take(self, keep: int = 0) -> FinishedStep | None:
        """Return the oldest item; None if there are no more than ``keep``."""
        if len(self._items) <= keep:
            return None
        try:
            size, item = self._items.popleft()
        except IndexError:
            return None
        self._taken += size
        return item


_WINDOW = 64
_MIN_LOSSES = 16
_UPDATE_INTERVAL = 16
"""Number of losses between updates of the range. A single loss is only compared with one number."""

_DEVIATIONS = 8.0
_RISE = 0.25
_NORMAL = 1.4826
_MAX_SERIES = 32


class LossRange:
    """The range of a name's last losses: median and median absolute deviation, which are robust to single outliers (Hampel 1974)."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_WINDOW)
        self._until_update = _MIN_LOSSES
        self._level = 0.0
        self._unit = 1.0
        self._limit = math.inf

    def excess(self, loss: float) -> float:
        """Return how far a loss is above the range, in units of the smallest relevant distance: 1 or more, or 0 within the range.

        The unit is the larger of eight robust standard deviations and a quarter of the level. NaN and infinite values are ignored:
        the gate detects them.
        """
        if not math.isfinite(loss):
            return 0.0
        excess = (loss - self._level) / self._unit if loss > self._limit else 0.0
        self._last.append(loss)
        self._until_update -= 1
        if not self._until_update:
            self._update()
        return excess

    def _update(self) -> None:
        self._until_update = _UPDATE_INTERVAL
        middle = len(self._last) // 2
        self._level = sorted(self._last)[middle]
        spread = _NORMAL * sorted(abs(loss - self._level) for loss in self._last)[middle]
        self._unit = max(_DEVIATIONS * spread, _RISE * abs(self._level))
        self._limit = self._level + self._unit if self._unit > 0 else math.inf


class LossOnsets:
    """Starts bursts of measuring when a training loss leaves its range. Runs on the training thread."""

    def __init__(self, burst: Callable[[float], bool]) -> None:
        """Start without losses.

        Args:
            burst: called with the excess of a loss above its range; returns whether measuring starts.
        """
        self._burst = burst
        self._ranges: dict[tuple[str, bool], LossRange] = {}

    def add(self, name: str, loss: float, *, derived: bool) -> bool:
        """Add a training loss. Returns whether everything is measured from now on because of it.

        Args:
            name: name of the loss.
            loss: its value.
            derived: it was detected at ``backward()``. Values that the program logs by the same name have their own range.
        """
        loss_range = self._ranges.get((name, derived))
        if loss_range is None:
            if len(self._ranges) >= _MAX_SERIES:
                return False
            loss_range = self._ranges[name, derived] = LossRange()
        excess = loss_range.excess(loss)
        return excess > 0 and self._burst(excess)


_MAX_VALUES = 1024
"""Number of values per name that are kept separately in host memory; more are merged."""

_MAX_PLAIN_VALUES = 32
"""Number of values per name, such as losses of micro-batches, that are merged outside the training thread."""

_MAX_ON_DEVICE = 256
"""Number of values per name that are kept on a device until they are measured together."""

_EVALUATIONS: frozenset[Mode] = frozenset({"eval", "predict"})


class DeviceScalar(Protocol):
    """A number in device memory, which is read without waiting."""

    def measure(self) -> Measurement:
        """Start to measure the number."""
        ...

    def copy(self) -> DeviceScalar:
        """Return a copy of the current number, in memory that the program does not write to."""
        ...

    def measure_all(self, scalars: Sequence[Any]) -> Measurement:
        """Start to measure several numbers of the same kind as one tensor."""
        ...


@dataclass
class _Scalar:
    """Values of one name in one mode.

    Attributes:
        info: description of the name.
        values: unmerged values in host memory.
        weights: the weight of each.
        merged: merged statistics of earlier values, as one row.
        measured: values that are being measured on a device.
        unmeasured: values in device memory, by their weights.
    """

    info: TensorInfo
    values: list[float] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    merged: StatisticsBatch | None = None
    measured: list[tuple[Measurement, Condition | None]] = field(default_factory=list)
    unmeasured: dict[int, list[DeviceScalar]] = field(default_factory=dict)

    @property
    def plain_values(self) -> int:
        """Number of its values in host memory if each has weight 1, and they are few; otherwise 0."""
        is_plain = self.merged is None and len(self.values) <= _MAX_PLAIN_VALUES and set(self.weights) == {1}
        return len(self.values) if is_plain else 0

    def add(self, value: float, weight: int) -> None:
        self.values.append(value)
        self.weights.append(weight)
        if len(self.values) >= _MAX_VALUES:
            self.merged, self.values, self.weights = self.statistics(), [], []

    def add_on_device(self, value: DeviceScalar, weight: int) -> None:
        if not self.measured and not self.unmeasured:
            self.measured.append((_weighted(value.measure(), weight), None))
            return
        self.unmeasured.setdefault(weight, []).append(value.copy())
        if sum(map(len, self.unmeasured.values())) >= _MAX_ON_DEVICE:
            self.measure_rest()

    def measure_rest(self) -> None:
        for weight, values in self.unmeasured.items():
            self.measured.append((_weighted(values[0].measure_all(values), weight), None))
        self.unmeasured = {}

    def statistics(self) -> StatisticsBatch:
        """Return statistics of the values in host memory, as one row."""
        rows = scalars(self.values)
        if any(weight != 1 for weight in self.weights):
            rows = Repeated(Completed(rows), np.array(self.weights, np.int64)).collect()
        if self.merged is not None:
            rows = StatisticsBatch.concatenate([self.merged, rows])
        return rows if len(rows) == 1 else merge_rows(rows, np.zeros(len(rows), np.intp), 1)


def _weighted(measurement: Measurement, weight: int) -> Measurement:
    """Return statistics, as one row, in which each value counts as many."""
    return measurement if weight == 1 else Repeated(measurement, np.array([weight], np.int64))


ScalarsOfStep = dict[tuple[Mode, str], _Scalar]
"""Losses and metrics of a step, by mode and name."""


class ScalarValues:
    """Losses and metrics recorded in the current step. Used on the training thread."""

    def __init__(self, health: RecorderHealth) -> None:
        self.onsets: LossOnsets | None = None
        """Receives each training loss in host memory."""
        self._health = health
        self._scalars: ScalarsOfStep = {}
        self._before_update: set[tuple[Mode, str]] = set()
        self._groups: dict[tuple[TensorInfo, ...], Group] = {}
        self._functions: dict[tuple[Mode, str], str] = {}
        self._is_derived: dict[str, bool] = {}

    def add(
        self, mode: Mode, name: str, value: float, *, derived: bool, replaces: bool, weight: int = 1
    ) -> None:
        """Record a number.

        Args:
            mode: mode of the row.
            name: name of the row.
            value: the number.
            derived: the program did not log it itself; a value that the program logs under this name replaces it.
            replaces: it replaces earlier values of this name, also for a loss.
            weight: number of examples that a loss is the mean of, as a weight in the mean of the row.
        """
        scalar = self._scalar(mode, name, derived=derived, replaces=replaces)
        if scalar is not None:
            scalar.add(value, weight if scalar.info.role == "loss" else 1)
            if self.onsets is not None and mode == "train" and scalar.info.role == "loss":
                self.onsets.add(name, value, derived=derived)

    def add_on_device(
        self, mode: Mode, name: str, value: DeviceScalar, *, derived: bool, replaces: bool, weight: int = 1
    ) -> None:
        """Record a number in device memory, like `add`."""
        scalar = self._scalar(mode, name, derived=derived, replaces=replaces)
        if scalar is not None:
            scalar.add_on_device(value, weight if scalar.info.role == "loss" else 1)

    def add_measured(
        self, mode: Mode, name: str, measurement: Measurement, condition: Condition | None, *, derived: bool
    ) -> None:
        """Record a number that is being measured, under a condition that is known later. It replaces earlier values."""
        scalar = self._scalar(mode, name, derived=derived, replaces=True)
        if scalar is not None:
            scalar.measured.append((measurement, condition))

    def note_function(self, mode: Mode, name: str, function: str) -> None:
        """Set the name of the function that computes a loss. The first call counts, because a series has one description.

        A loss of an evaluation has no graph, and the function of the training loss of its name, whose description it shares.
        """
        if mode == "train" or function:
            self._functions.setdefault((mode, name), function)

    def undivide(self, mode: Mode, name: str, divisor: float) -> None:
        """Multiply the derived values of a name so far by a number. Values that the program logs are unchanged."""
        scalar = self._scalars.get((mode, name))
        if scalar is not None and scalar.info.derived and scalar.merged is None:
            scalar.measure_rest()
            scalar.values = [value * divisor for value in scalar.values]
            scalar.measured = [
                (Rescaled(measurement, lambda: 1 / divisor), condition)
                for measurement, condition in scalar.measured
            ]

    def update_done(self) -> None:
        """Mark evaluations so far as complete, because the weights have changed."""
        if self._scalars:
            self._before_update = {key for key in self._scalars if key[0] in _EVALUATIONS}

    def take_derived(self) -> ScalarsOfStep:
        """Remove and return the values of the current step that the program did not log itself."""
        derived = {key: scalar for key, scalar in self._scalars.items() if scalar.info.derived}
        for key in derived:
            del self._scalars[key]
        return derived

    def adopt(self, values: ScalarsOfStep) -> None:
        """Add the values of a step that another recording returned by `take_derived`."""
        self._scalars |= values

    def clear(self) -> None:
        """Clear the values for the next step."""
        if self._scalars:
            self._scalars = {}
            self._before_update.clear()

    def rows(self) -> Iterator[tuple[Mode, Group, Measurement, Condition | None]]:
        """Yield the rows of the step so far: values in host memory by mode, the others one by one."""
        alike: dict[tuple[Mode, int], list[_Scalar]] = {}
        for (mode, _), scalar in self._scalars.items():
            scalar.measure_rest()
            for measurement, condition in scalar.measured:
                yield mode, Group.of((self._described(mode, scalar.info),)), measurement, condition
            if scalar.values or scalar.merged is not None:
                alike.setdefault((mode, scalar.plain_values), []).append(scalar)
        for (mode, values), members in alike.items():
            infos = tuple(self._described(mode, scalar.info) for scalar in members)
            group = self._groups.setdefault(infos, Group.of(infos))
            # Several values of one name are merged outside the training thread, like other rows of one tensor.
            for place in range(values):
                yield mode, group, StepNumbers(tuple(float(scalar.values[place]) for scalar in members)), None
            if not values:
                statistics = StatisticsBatch.concatenate([scalar.statistics() for scalar in members])
                yield mode, group, Completed(statistics), None

    def _described(self, mode: Mode, info: TensorInfo) -> TensorInfo:
        """Describe a name for all modes: a value that the program logs in an evaluation does not change that those of training are derived."""
        if mode == "train":
            self._is_derived[info.name] = info.derived
        derived = self._is_derived.get(info.name, info.derived)
        return info if derived == info.derived else replace(info, derived=derived)

    def _scalar(self, mode: Mode, name: str, *, derived: bool, replaces: bool) -> _Scalar | None:
        """Return where to add a number; None if the program has logged this name itself."""
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
        function = self._functions.setdefault(key, self._functions.get(("train", name), ""))
        scalar = self._scalars[key] = _Scalar(scalar_info(name, derived=derived, function=function))
        return scalar


@functools.lru_cache(maxsize=4096)
def report_info(metric: str, text: str) -> TensorInfo:
    """Describe a metric whose name carries a text after ``@``. It is a metric whatever words the text has."""
    return TensorInfo(f"{metric}@{text}", (METRICS,), "metric", dtype="float64")


def scalar_info(name: str, *, derived: bool = False, function: str = "") -> TensorInfo:
    """Describe a number: a loss if its name contains "loss", else a metric."""
    is_loss = "loss" in name.lower()
    return TensorInfo(
        name,
        (LOSSES if is_loss else METRICS,),
        "loss" if is_loss else "metric",
        module_type=function if is_loss else "",
        dtype="float64",
        derived=derived,
    )
