"""Columns of statistics as numpy arrays, and the selection of rows and columns of an object for a query."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError
from watchstep.format.block import STAGES, to_numbers, to_places
from watchstep.format.segment_checks import PROBE
from watchstep.format.statistics import (
    COUNT_COLUMNS,
    DERIVED,
    VALUE_COLUMNS,
    Floats,
    Histograms,
    StatisticsBatch,
)
from watchstep.format.tensors import MODES, TensorInfo
from watchstep.reading.arrow_object import ArrowObject
from watchstep.reading.compacted import CompactedObject

if TYPE_CHECKING:
    import pyarrow as pa


Columns = dict[str, NDArray[Any]]
"""Column name → array of shape (n,). Words are indices: into `MODES`, `STAGES`, and the run's tensors."""

IDENTITY = ("step", "mode", "worker", "tensor", "shard_count", "replica", "stage")
"""Columns that identify the rows of a figure."""

COUNTED = (*COUNT_COLUMNS, *VALUE_COLUMNS)
"""The figures of a row, except the histogram."""

_FINITE = ("count", "nan", "pos_inf", "neg_inf")
_NEEDS: dict[str, tuple[str, ...]] = {
    "sum": ("mean", *_FINITE),
    "variance": ("m2", *_FINITE),
    "std": ("m2", *_FINITE),
    "l1": ("abs_sum", *_FINITE),
    "l2": ("square_sum", *_FINITE),
    "rms": ("square_sum", *_FINITE),
    "abs_mean": ("abs_sum", *_FINITE),
    "abs_variance": ("m2", "mean", "abs_sum", *_FINITE),
    "abs_std": ("m2", "mean", "abs_sum", *_FINITE),
    "abs_max": ("min", "max"),
    "zero_share": ("zero", "count"),
    "nonfinite_share": _FINITE,
}
_WORDS: dict[str, tuple[str, ...]] = {"mode": MODES, "stage": STAGES}


def needs_of(figure: str, probes: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the recorded columns that a figure is computed from.

    Args:
        figure: a column of a segment, a derived figure, or a probe.
        probes: names of the run's probes.

    Raises:
        ConfigError: the figure does not exist.
    """
    named_probes = list(probes)
    if figure in COUNTED or figure == "time_ns":
        return (figure,)
    if figure in DERIVED:
        return _NEEDS[figure]
    if figure.removeprefix(PROBE) in named_probes:
        return (PROBE + figure.removeprefix(PROBE),)
    names = ", ".join([*COUNTED, *DERIVED, *named_probes])
    raise ConfigError(f"unknown figure {figure!r}", f"use one of {names}")


def figure_of(columns: Mapping[str, NDArray[Any]], figure: str) -> Floats:
    """Return a figure of n rows, float64; NaN where it does not exist. Requires its columns (`needs_of`)."""
    if figure in DERIVED:
        with np.errstate(all="ignore"):
            return DERIVED[figure](batch_of(columns))
    values = columns[figure] if figure in columns else columns[PROBE + figure.removeprefix(PROBE)]
    return values.astype(np.float64)


def batch_of(columns: Mapping[str, NDArray[Any]]) -> StatisticsBatch:
    """Return statistics without histograms; figures of missing columns are zero."""
    rows = len(columns["step"])
    missing = np.broadcast_to(np.zeros(1, np.int64), rows), np.broadcast_to(np.zeros(1), rows)
    counts = {name: columns.get(name, missing[0]) for name in COUNT_COLUMNS}
    values = {name: columns.get(name, missing[1]) for name in VALUE_COLUMNS}
    return StatisticsBatch(**counts, **values, histogram=Histograms.empty(rows))


def from_table(table: pa.Table, places: Mapping[str, int]) -> Columns:
    """Return a table's columns, except histograms, as arrays.

    Args:
        table: columns of a segment.
        places: name → the run's index, for each tensor of the object's catalogue.

    Raises:
        ValueError, KeyError: a word or a number is not valid in a segment.
    """
    columns: Columns = {}
    for name in table.column_names:
        column = table.column(name)
        if name == "tensor":
            columns[name] = to_places(column, places, np.int32, name)
        elif name in _WORDS:
            codes = {word: code for code, word in enumerate(_WORDS[name])}
            columns[name] = to_places(column, codes, np.int8, name)
        elif column.null_count and not (name in VALUE_COLUMNS or name.startswith(PROBE)):
            raise ValueError(f"column {name} has nulls")
        else:
            columns[name] = to_numbers(column)
    return columns


def constants(values: Mapping[str, int], names: Iterable[str], rows: int) -> Columns:
    """Return columns with one value each, of n rows without memory; only those in ``names``."""
    return {
        name: np.broadcast_to(np.array(values[name], np.int8 if name in _WORDS else np.int32), rows)
        for name in names
        if name in values
    }


def is_one_of(column: pa.ChunkedArray, words: Collection[str]) -> NDArray[np.bool_]:
    """Return which rows of a column of words have one of the words; bool of shape (n,)."""
    import pyarrow as pa

    if not len(column):
        return np.zeros(0, np.bool_)
    merged = pa.concat_arrays(column.chunks)
    if not pa.types.is_dictionary(merged.type):
        merged = merged.dictionary_encode()
    chosen = np.array([word in words for word in merged.dictionary.to_pylist()] or [False], np.bool_)
    mask: NDArray[np.bool_] = chosen[to_numbers(merged.indices)]
    return mask


def joined(parts: list[Columns], names: Iterable[str]) -> Columns:
    """Concatenate parts."""
    return {
        name: np.concatenate([part[name] for part in parts]) if parts else np.empty(0, _dtype(name))
        for name in names
    }


def _dtype(name: str) -> type:
    return np.float64 if name in VALUE_COLUMNS or name.startswith(PROBE) else np.int64


NO_CUT = np.iinfo(np.int64).max
"""A step beyond all others."""


@dataclass(frozen=True)
class Selection:
    """What a query reads.

    Attributes:
        columns: names; `IDENTITY` is always included.
        tensors: only rows of these tensors, by name; None for all.
        first: only rows from this step on.
        last: only rows up to this step.
    """

    columns: tuple[str, ...]
    tensors: frozenset[str] | None = None
    first: int = 0
    last: int = NO_CUT


@dataclass(frozen=True)
class Located:
    """An object, its attempt, and the first step that a later attempt repeats."""

    attempt: str
    object: ArrowObject | CompactedObject
    cut: int = NO_CUT


class Scan:
    """Columns and rows of one scan. Lookups for a catalogue are cached, because most objects share it."""

    def __init__(self, names: tuple[str, ...], selection: Selection, tensors: list[TensorInfo]) -> None:
        self.names = names
        self._selection = selection
        self._index = {info.name: index for index, info in enumerate(tensors)}
        self._places: dict[int, dict[str, int]] = {}
        chosen = [selection.tensors is None or info.name in selection.tensors for info in tensors]
        self._chosen = np.array(chosen or [False], np.bool_)

    def places(self, catalogue: tuple[TensorInfo, ...]) -> dict[str, int]:
        """Return name → the run's index for each tensor of a catalogue, which must be kept alive by an object."""
        if id(catalogue) not in self._places:
            self._places[id(catalogue)] = {info.name: self._index[info.name] for info in catalogue}
        return self._places[id(catalogue)]

    def is_selected(self, places: dict[str, int]) -> bool:
        """Whether any tensor of an object is selected."""
        return bool(self._chosen[list(places.values())].any())

    def chosen(self, columns: Columns, located: Located) -> Columns:
        """Return the selected rows of an object's columns."""
        step, selection = columns["step"], self._selection
        rows = np.ones(len(step), np.bool_) if self._chosen.all() else self._chosen[columns["tensor"]]
        stored = located.object
        if selection.first > stored.first or min(selection.last, located.cut - 1) < stored.last:
            rows &= (step >= selection.first) & (step <= selection.last) & (step < located.cut)
        if rows.all():
            return columns
        indices = np.flatnonzero(rows)
        return {name: column[indices] for name, column in columns.items()}
