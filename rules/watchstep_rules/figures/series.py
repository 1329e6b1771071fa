"""Rows by the series that they belong to, over whole columns: rules that remember something of each series loop over neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from watchstep.block import Block
from watchstep.sort_key import sort_key
from watchstep.tensors import MODES

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
