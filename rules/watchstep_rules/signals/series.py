"""Rows by series (tensor, worker and mode) over whole columns: earlier rows, consecutive rows, flags, and merged shards."""

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
    """n rows by k series.

    Attributes:
        names: of the series: ``tensor@worker``, and ``/mode`` where modes are told apart.
        series: that of each row, an index into ``names``, shape (n,).
        order: rows, those of one series together, as they came, shape (n,).
        starts: where in ``order`` each series begins, shape (k,).
    """

    names: list[str]
    series: NDArray[np.intp]
    order: NDArray[np.intp]
    starts: NDArray[np.intp]

    @classmethod
    def of(cls, block: Block, *, by_mode: bool = False) -> SeriesRows:
        """The rows of a block."""
        key = sort_key(block.tensor, block.worker, *([block.mode] if by_mode else []))
        series, count = _dense(key)
        # Numbers of two bytes are sorted by digits, in one pass or two.
        order = np.argsort(series.astype(np.uint16) if count < 2**16 else series, kind="stable")
        starts = np.searchsorted(series[order], np.arange(count))
        first = order[starts]
        of = [block.catalogue[tensor].name for tensor in block.tensor[first].tolist()]
        names = [f"{name}@{worker}" for name, worker in zip(of, block.worker[first].tolist(), strict=True)]
        if by_mode:
            modes = [MODES[mode] for mode in block.mode[first].tolist()]
            names = [f"{name}/{mode}" for name, mode in zip(names, modes, strict=True)]
        return cls(names, series, order, starts)

    def before(self, values: NDArray[_Number], first: NDArray[_Number] | bool | float) -> NDArray[_Number]:
        """What the row before of the same series has.

        Args:
            values: of each row, shape (n,).
            first: what the first row of each series gets: of each series, shape (k,), or one for all.
        """
        if not len(values):
            return values
        ordered = values[self.order]
        earlier = np.concatenate([ordered[:1], ordered[:-1]])
        earlier[self.starts] = first
        held = np.empty_like(values)
        held[self.order] = earlier
        return held

    def last(self, values: NDArray[Any]) -> list[Any]:
        """What the last row of each series has."""
        ends = np.concatenate([self.starts[1:], [len(self.order)]]) - 1
        found: list[Any] = values[self.order[ends]].tolist() if len(self.names) else []
        return found

    def rows(self) -> list[NDArray[np.intp]]:
        """The rows of each series, as they came."""
        return np.split(self.order, self.starts[1:]) if self.names else []


def _dense(key: NDArray[np.int64]) -> tuple[NDArray[np.intp], int]:
    """The keys as numbers 0 … k - 1 in the same order, and k."""
    if not len(key):
        return key.astype(np.intp), 0
    span = int(key.max()) + 1
    if span > 4 * len(key) + 2**16:
        found, number = np.unique(key, return_inverse=True)
        return number.astype(np.intp), len(found)
    there = np.zeros(span, np.bool_)
    there[key] = True
    number = np.cumsum(there) - 1
    return number[key], int(number[-1]) + 1


Column = Callable[[Block], NDArray[Any]]


@dataclass(frozen=True)
class Trail:
    """Rows of a block behind those of its context, each series by itself.

    Attributes:
        context: earlier rows, as the contract gives them.
        block: n rows to judge.
        order: rows of context and block, those of a series together, as they came.
        place: where in ``order`` each row of the block stands, int64 of shape (n,).
        start: where in ``order`` its series begins.
    """

    context: Block
    block: Block
    order: NDArray[np.int64]
    place: NDArray[np.int64]
    start: NDArray[np.int64]

    @classmethod
    def of(cls, context: Block, block: Block) -> Trail:
        """Behind these rows of the context, those of the block."""
        known = {info.name: index for index, info in enumerate(block.catalogue)}
        tensor = np.array([known.get(info.name, -1) for info in context.catalogue], np.int64)
        past = context.series_key()
        if len(context):
            past = (tensor[context.tensor] << 32) | (past & 0xFFFFFFFF)
        key = np.concatenate([past, block.series_key()])
        order = np.argsort(key, kind="stable")
        place = np.empty(len(key), np.int64)
        place[order] = np.arange(len(key))
        start = np.searchsorted(key[order], key, side="left")
        return cls(context, block, order, place[len(context) :], start[len(context) :])

    def at(self, rows: NDArray[np.intp]) -> Trail:
        """Behind some rows of the block alone."""
        return replace(self, place=self.place[rows], start=self.start[rows])

    def column(self, figure: Column) -> Floats:
        """A figure of the context's rows and of the block's, one after the other, as `back` takes it."""
        return np.concatenate([figure(self.context), figure(self.block)]).astype(np.float64)

    def back(self, column: Floats, rows: int) -> Floats:
        """Of each row of the block, what stood so many rows before it in its series; NaN where there is none."""
        at = self.place - rows
        held = np.full(len(at), np.nan)
        there = at >= self.start
        held[there] = column[self.order[at[there]]]
        return held


def in_a_row(
    context: Block, block: Block, hit: Callable[[Block], NDArray[np.bool_]], records: int
) -> NDArray[np.bool_]:
    """Whether so many records in a row, a row's own the last, are hits; bool of shape (n,).

    Args:
        context: earlier rows; the rule's lookback must be at least ``records - 1``.
        block: n rows.
        hit: of each row of a block, whether it is one.
        records: how many, at least 1.
    """
    if not hit(block).any():  # as nearly always
        return np.zeros(len(block), np.bool_)
    trail = Trail.of(context, block)
    column = trail.column(hit)
    found = np.ones(len(block), np.bool_)
    for back in range(records):
        found &= trail.back(column, back) > 0
    return found


def probe(block: Block, name: str) -> Floats:
    """A column of probes; NaN where the block has none."""
    column = block.probes.get(name)
    return np.full(len(block), np.nan) if column is None else column


def whole_steps(block: Block) -> list[NDArray[np.intp]]:
    """Rows of each step in train mode, steps ascending, rows in their order."""
    rows = np.flatnonzero(block.mode == 0)
    rows = rows[np.argsort(block.step[rows], kind="stable")]
    return [part for part in np.split(rows, np.flatnonzero(np.diff(block.step[rows])) + 1) if len(part)]


def in_training(block: Block) -> Block:
    """The rows in train mode, steps ascending, rows of a step in their order; the block itself where it is so."""
    if bool((block.mode == 0).all()) and bool((np.diff(block.step) >= 0).all()):
        return block
    rows = np.flatnonzero(block.mode == 0)
    return view(block, rows[np.argsort(block.step[rows], kind="stable")])


def step_numbers(block: Block) -> NDArray[np.intp]:
    """Of each row the number of its step among those of the block, from 0; steps ascend."""
    if not len(block):
        return np.empty(0, np.intp)
    return np.concatenate([[0], np.cumsum(np.diff(block.step) != 0)])


class Flags:
    """A yes or no by mode that holds from the step at which it was seen until another is."""

    def __init__(self, before: dict[str, bool]) -> None:
        self.last = dict(before)
        self._before = before
        self._seen: dict[str, tuple[list[int], list[bool]]] = {}

    def seen_at(self) -> list[tuple[str, int]]:
        """Modes and steps at which it was yes."""
        return [
            (mode, step)
            for mode, (steps, flags) in self._seen.items()
            for step, flag in zip(steps, flags, strict=True)
            if flag
        ]

    def see(self, mode: str, step: int, *, flag: bool) -> None:
        """Steps ascend; of one step the last counts."""
        steps, flags = self._seen.setdefault(mode, ([], []))
        steps.append(step)
        flags.append(flag)
        self.last[mode] = flag

    def at(self, mode: str, step: int) -> bool:
        """As of a step, its own included."""
        steps, flags = self._seen.get(mode, ([], []))
        place = bisect_right(steps, step)
        return flags[place - 1] if place else self._before.get(mode, False)


def both(before: dict[str, bool], risen: Flags, overwritten: Flags) -> Flags:
    """Whether there was a step with both so far."""
    flags = Flags(before)
    for mode, step in risen.seen_at():
        if overwritten.at(mode, step):
            flags.see(mode, step, flag=True)
    return flags


_FLAGS = ("changed", "was_optimized", "optimized_share", "after_optimized", "weight_optimized")
"""Probes of parameters that no optimizer holds: what holds of one shard holds of the parameter."""


def merge_shards(block: Block) -> Block:
    """Merge the shards of each (step, mode, tensor, replica, stage); replicas and whole tensors stay as they are.

    Workers merge in ascending order, whatever order they arrived in. The merged row takes the number of its replica as
    its worker, so that it belongs to the same series whichever of its shards are there, and the latest time. Of probes it has
    those of `_FLAGS`, the largest of all shards; others do not merge. The result is in canonical order, and makes its columns when
    they are read.
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
