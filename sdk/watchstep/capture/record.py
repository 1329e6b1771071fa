"""A record: statistics of some tensors at one step, on their way to the writer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from watchstep.block import Block, Places, concatenate
from watchstep.capture.element_probes import counts_on, is_summed
from watchstep.kernels.interface import Measurement
from watchstep.sort_key import sort_key
from watchstep.statistics import Floats, merge_rows
from watchstep.tensors import MODES, Mode, Placement, TensorInfo

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
