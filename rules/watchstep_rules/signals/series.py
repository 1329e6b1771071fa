"""Rows by series (tensor, worker and mode), computed over whole columns: earlier rows, consecutive rows, flags, and merged shards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, LazyBlock, LazyStatistics, Places, sort_key, together, view
from watchstep.format.statistics import Floats, Merge
from watchstep.format.tensors import MODES

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True)
class SeriesRows:
    """n rows grouped into k series.

    Attributes:
        names: names of the series: ``tensor@worker``, or ``tensor@worker/mode``.
        series: the series of each row, an index into ``names``, shape (n,).
        order: rows grouped by series, in order of arrival within a series, shape (n,).
        starts: the index in ``order`` at which each series begins, shape (k,).
    """

    names: list[str]
    series: NDArray[np.intp]
    order: NDArray[np.intp]
    starts: NDArray[np.intp]

    @classmethod
    def of(cls, block: Block, *, by_mode: bool = False) -> SeriesRows:
        """Group the rows of a block."""
        key = sort_key(block.tensor, block.worker, *([block.mode] if by_mode else []))
        series, count = _dense(key)
        # NumPy sorts 16-bit integers with a radix sort, in one or two passes.
        order = np.argsort(series.astype(np.uint16) if count < 2**16 else series, kind="stable")
        starts = np.searchsorted(series[order], np.arange(count))
        first = order[starts]
        tensors = [block.catalogue[tensor].name for tensor in block.tensor[first].tolist()]
        workers = block.worker[first].tolist()
        names = [f"{name}@{worker}" for name, worker in zip(tensors, workers, strict=True)]
        if by_mode:
            modes = [MODES[mode] for mode in block.mode[first].tolist()]
            names = [f"{name}/{mode}" for name, mode in zip(names, modes, strict=True)]
        return cls(names, series, order, starts)

    def before(self, values: NDArray[_Number], first: NDArray[_Number] | bool | float) -> NDArray[_Number]:
        """For each row the value of the previous row of its series.

        Args:
            values: the values of the rows, shape (n,).
            first: the result for the first row of each series: shape (k,), or one value for all.
        """
        if not len(values):
            return values
        ordered = values[self.order]
        earlier = np.concatenate([ordered[:1], ordered[:-1]])
        earlier[self.starts] = first
        previous = np.empty_like(values)
        previous[self.order] = earlier
        return previous

    def last(self, values: NDArray[Any]) -> list[Any]:
        """The value of the last row of each series."""
        ends = np.concatenate([self.starts[1:], [len(self.order)]]) - 1
        last: list[Any] = values[self.order[ends]].tolist() if len(self.names) else []
        return last

    def rows(self) -> list[NDArray[np.intp]]:
        """The rows of each series, in order of arrival."""
        return np.split(self.order, self.starts[1:]) if self.names else []


def _dense(key: NDArray[np.int64]) -> tuple[NDArray[np.intp], int]:
    """The keys as ranks 0 … k - 1, and k."""
    if not len(key):
        return key.astype(np.intp), 0
    span = int(key.max()) + 1
    if span > 4 * len(key) + 2**16:
        distinct, rank = np.unique(key, return_inverse=True)
        return rank.astype(np.intp), len(distinct)
    is_used = np.zeros(span, np.bool_)
    is_used[key] = True
    rank = np.cumsum(is_used) - 1
    return rank[key], int(rank[-1]) + 1


Column = Callable[[Block], NDArray[Any]]


@dataclass(frozen=True)
class LaggedRows:
    """Access to earlier rows of each series: the rows of a block after those of its context.

    Attributes:
        context: earlier rows.
        block: n rows to judge.
        order: rows of context and block, grouped by series, in order of arrival within a series.
        place: the index in ``order`` of each row of the block, int64 of shape (n,).
        start: the index in ``order`` at which its series begins.
    """

    context: Block
    block: Block
    order: NDArray[np.int64]
    place: NDArray[np.int64]
    start: NDArray[np.int64]

    @classmethod
    def of(cls, context: Block, block: Block) -> LaggedRows:
        """The rows of a context followed by those of a block."""
        index_of = {info.name: index for index, info in enumerate(block.catalogue)}
        tensor = np.array([index_of.get(info.name, -1) for info in context.catalogue], np.int64)
        past = context.series_key()
        if len(context):
            past = (tensor[context.tensor] << 32) | (past & 0xFFFFFFFF)
        key = np.concatenate([past, block.series_key()])
        order = np.argsort(key, kind="stable")
        place = np.empty(len(key), np.int64)
        place[order] = np.arange(len(key))
        start = np.searchsorted(key[order], key, side="left")
        return cls(context, block, order, place[len(context) :], start[len(context) :])

    def at(self, rows: NDArray[np.intp]) -> LaggedRows:
        """The same for some rows of the block."""
        return replace(self, place=self.place[rows], start=self.start[rows])

    def column(self, figure: Column) -> Floats:
        """A figure of the context's rows followed by the block's, as an argument of `lag`."""
        return np.concatenate([figure(self.context), figure(self.block)]).astype(np.float64)

    def lag(self, column: Floats, rows: int) -> Floats:
        """For each row of the block, the value ``rows`` rows earlier in its series; NaN if there is no such row."""
        at = self.place - rows
        values = np.full(len(at), np.nan)
        exists = at >= self.start
        values[exists] = column[self.order[at[exists]]]
        return values


def in_a_row(
    context: Block, block: Block, hit: Callable[[Block], NDArray[np.bool_]], records: int
) -> NDArray[np.bool_]:
    """Whether the last ``records`` records up to and including a row are all hits; bool of shape (n,).

    Args:
        context: earlier rows; the rule's lookback must be at least ``records - 1``.
        block: n rows.
        hit: returns for each row of a block whether it is a hit.
        records: number of records, at least 1.
    """
    if not hit(block).any():  # the usual case
        return np.zeros(len(block), np.bool_)
    lagged = LaggedRows.of(context, block)
    column = lagged.column(hit)
    result = np.ones(len(block), np.bool_)
    for rows in range(records):
        result &= lagged.lag(column, rows) > 0
    return result


def probe(block: Block, name: str) -> Floats:
    """A column of probes; NaN if the block does not have it."""
    column = block.probes.get(name)
    return np.full(len(block), np.nan) if column is None else column


def whole_steps(block: Block) -> list[NDArray[np.intp]]:
    """The rows of each step in train mode, steps ascending, rows of a step in their order."""
    rows = np.flatnonzero(block.mode == 0)
    rows = rows[np.argsort(block.step[rows], kind="stable")]
    return [part for part in np.split(rows, np.flatnonzero(np.diff(block.step[rows])) + 1) if len(part)]


def in_training(block: Block) -> Block:
    """The rows in train mode, steps ascending, rows of a step in their order; the block itself if nothing changes."""
    if bool((block.mode == 0).all()) and bool((np.diff(block.step) >= 0).all()):
        return block
    rows = np.flatnonzero(block.mode == 0)
    return view(block, rows[np.argsort(block.step[rows], kind="stable")])


def step_numbers(block: Block) -> NDArray[np.intp]:
    """The index of each row's step among the block's steps, from 0; steps must ascend."""
    if not len(block):
        return np.empty(0, np.intp)
    return np.concatenate([[0], np.cumsum(np.diff(block.step) != 0)])


class Flags:
    """A boolean per mode that changes over the steps; each value applies from its step to the next one."""

    def __init__(self, before: dict[str, bool]) -> None:
        self.last = dict(before)
        self._before = before
        self._changes: dict[str, tuple[list[int], list[bool]]] = {}

    def true_at(self) -> list[tuple[str, int]]:
        """Modes and steps at which the flag was set to true."""
        return [
            (mode, step)
            for mode, (steps, flags) in self._changes.items()
            for step, flag in zip(steps, flags, strict=True)
            if flag
        ]

    def record(self, mode: str, step: int, *, flag: bool) -> None:
        """Set the flag from a step on. Steps must ascend; the last call for a step counts."""
        steps, flags = self._changes.setdefault(mode, ([], []))
        steps.append(step)
        flags.append(flag)
        self.last[mode] = flag

    def at(self, mode: str, step: int) -> bool:
        """The flag at a step, including changes at that step."""
        steps, flags = self._changes.get(mode, ([], []))
        place = bisect_right(steps, step)
        return flags[place - 1] if place else self._before.get(mode, False)


def both(before: dict[str, bool], risen: Flags, overwritten: Flags) -> Flags:
    """Whether there has been a step at which both flags were true."""
    flags = Flags(before)
    for mode, step in risen.true_at():
        if overwritten.at(mode, step):
            flags.record(mode, step, flag=True)
    return flags


_FLAGS = ("changed", "was_optimized", "optimized_share", "after_optimized", "weight_optimized")
"""Probes of parameters in no optimizer that are true for the parameter if they are true for one shard."""


def merge_shards(block: Block) -> Block:
    """Merge the shards of each (step, mode, tensor, replica, stage); replicas and whole tensors are unchanged.

    Workers merge in ascending order, independent of the order of arrival. The worker of a merged row is the number of its replica, so
    that the row belongs to the same series whichever shards are present; its time is the latest. Probes in `_FLAGS` take the maximum of
    all shards; other probes are dropped. The result is in canonical order and computes its columns on access.
    """
    sharded = block.places.shard_count > 1
    if not sharded.any():
        return block.ordered()
    merged = _merged(view(block, np.flatnonzero(sharded)).ordered())
    if sharded.all():
        return merged.ordered()
    return together(view(block, np.flatnonzero(~sharded)), merged).ordered()


def _merged(block: Block) -> Block:
    places = block.places
    key = sort_key(block.step, block.mode, block.tensor, places.replica, places.stage)
    order = np.argsort(key, kind="stable")
    begins = np.concatenate([[True], np.diff(key[order]) != 0])
    starts = np.flatnonzero(begins)
    first = order[starts]
    group = np.empty(len(order), np.intp)
    group[order] = np.cumsum(begins) - 1
    merge = Merge(block.statistics, group, len(first))

    def column(name: str) -> Any:
        if name == "catalogue":
            return block.catalogue
        if name == "time_ns":
            return np.maximum.reduceat(block.time_ns[order], starts)
        if name == "worker":
            return places.replica[first]
        if name == "places":
            ones = np.ones(len(first), np.int32)
            return Places(np.zeros_like(ones), ones, places.replica[first], places.stage[first])
        if name == "statistics":
            return LazyStatistics.of(len(first), merge.column)
        if name == "probes":
            return {
                probe: np.maximum.reduceat(values[order], starts)
                for probe, values in block.probes.items()
                if probe in _FLAGS
            }
        return getattr(block, name)[first]

    return LazyBlock.of(len(first), column)
