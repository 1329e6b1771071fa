"""Records: the statistics of a step on their way to the writer, through a queue bounded by bytes that never blocks training."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from watchstep.capture.config import counts_on, is_summed
from watchstep.format.block import Block, Places, concatenate, sort_key
from watchstep.format.statistics import Floats, merge_rows
from watchstep.format.tensors import MODES, Mode, Placement, TensorInfo
from watchstep.kernels.measurement import Measurement

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
        known: int | None = getattr(self.measurement, "bytes", None)  # of a device's it is not known yet
        statistics = _ROW_BYTES * rows if known is None else _ROW_BYTES_BESIDES * rows + known
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
    last, known = np.full(groups, np.nan), ~np.isnan(column)
    last[group[known]] = column[known]  # of one place the last assignment stands
    return last


def join(records: list[Record]) -> Block:
    """All records whose condition holds as one block in canonical order."""
    held = [record for record in records if record.condition is None or record.condition.holds()]
    return merge_repeats(concatenate([to_block(record) for record in held])) if held else Block.empty()


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
