"""What is asked of a run's objects, and which rows and columns of one that comes to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from watchstep.format.tensors import TensorInfo
from watchstep.reading.columns import Columns
from watchstep.reading.compacted import CompactedObject
from watchstep.reading.parquet_object import ParquetObject

NO_CUT = np.iinfo(np.int64).max
"""Of steps: beyond all."""


@dataclass(frozen=True)
class Want:
    """What to read.

    Attributes:
        columns: names; `IDENTITY` comes with them.
        tensors: only rows of these tensors, by name; all where it is None.
        first: only rows from this step on.
        last: only rows up to this step.
    """

    columns: tuple[str, ...]
    tensors: frozenset[str] | None = None
    first: int = 0
    last: int = NO_CUT


@dataclass(frozen=True)
class Located:
    """An object, the attempt that it is of, and the first step that a later attempt did again."""

    attempt: str
    object: ParquetObject | CompactedObject
    cut: int = NO_CUT


class Scan:
    """Which columns and rows one scan is for; what follows from a catalogue is found once, for most objects share it."""

    def __init__(self, names: tuple[str, ...], want: Want, tensors: list[TensorInfo]) -> None:
        self.names = names
        self._want = want
        self._index = {info.name: place for place, info in enumerate(tensors)}
        self._places: dict[int, dict[str, int]] = {}
        chosen = [want.tensors is None or info.name in want.tensors for info in tensors]
        self._chosen = np.array(chosen or [False], np.bool_)

    def places(self, catalogue: tuple[TensorInfo, ...]) -> dict[str, int]:
        """Name → the run's index, of each tensor of a catalogue that some object holds on to."""
        if id(catalogue) not in self._places:
            self._places[id(catalogue)] = {info.name: self._index[info.name] for info in catalogue}
        return self._places[id(catalogue)]

    def is_wanted(self, places: dict[str, int]) -> bool:
        """Whether any tensor of an object is."""
        return bool(self._chosen[list(places.values())].any())

    def chosen(self, held: Columns, located: Located) -> Columns:
        """The rows that are wanted, of an object's columns."""
        step, want = held["step"], self._want
        rows = np.ones(len(step), np.bool_) if self._chosen.all() else self._chosen[held["tensor"]]
        one = located.object
        if want.first > one.first or min(want.last, located.cut - 1) < one.last:
            rows &= (step >= want.first) & (step <= want.last) & (step < located.cut)
        if rows.all():
            return held
        kept = np.flatnonzero(rows)
        return {name: column[kept] for name, column in held.items()}
