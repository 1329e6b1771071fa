"""Comparison with another run: a compact record of its statistics, and whether two records of a tensor can be close element by element.

If elements are within ``atol + rtol * |old|`` of each other, these statistics stay within bounds. Statistics outside the bounds rule
closeness out; statistics within the bounds do not prove it.

- ``x - atol - rtol * |x|`` and ``x + atol + rtol * |x|`` increase with x if ``rtol < 1``, so the smallest and the largest element
  move by no more than their own tolerance.
- The mean moves by at most the mean tolerance, ``atol + rtol * mean |old|``; so does the mean magnitude.
- The root mean square moves by at most the rms of the tolerances, ``atol + rtol * rms(old)``, by the triangle inequality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import RuleError
from watchstep.format.block import Block, sort_key, view
from watchstep.format.statistics import (
    DERIVED,
    VALUE_COLUMNS,
    Derivation,
    Floats,
    StatisticsBatch,
    abs_mean,
    rms,
)
from watchstep_rules.signals import tensor_selection
from watchstep_rules.signals.series import Column, merge_shards

_COUNTS = ("count", "nan", "pos_inf", "neg_inf")
_RECORDED = (*_COUNTS, "min", "max", "mean")


def _derived(figure: Derivation) -> Column:
    return lambda block: figure(block.statistics)


COLUMNS: Mapping[str, Column] = {
    **{name: attrgetter(f"statistics.{name}") for name in _RECORDED},
    "abs_mean": _derived(abs_mean),
    "rms": _derived(rms),
}
"""The compared statistics."""

Figures = Callable[[str], Floats]
"""Returns a statistic of `COLUMNS` by name, float64 of shape (n,); NaN without a record."""


def may_be_close(new: Figures, old: Figures, rtol: float, atol: float) -> NDArray[np.bool_]:
    """Return whether no statistic rules closeness out, bool of shape (n,).

    Args:
        new: statistics of the later records.
        old: statistics of the earlier records.
        rtol: relative tolerance, as a share of the earlier element.
        atol: absolute tolerance.
    """
    close = np.ones(len(new("count")), np.bool_)
    for name in _COUNTS:
        close &= new(name) == old(name)
    scales = {"min": "min", "max": "max", "mean": "abs_mean", "abs_mean": "abs_mean", "rms": "rms"}
    for name, scale in scales.items():
        close &= is_within(new(name), old(name), old(scale), rtol, atol)
    return close


def is_within(new: Floats, old: Floats, scale: Floats, rtol: float, atol: float) -> NDArray[np.bool_]:
    """Return whether values moved by at most ``atol + rtol * |scale|``, or are NaN in both records; bool of shape (n,)."""
    with np.errstate(invalid="ignore"):
        close: NDArray[np.bool_] = np.abs(new - old) <= atol + rtol * np.abs(scale)
    return close | (np.isnan(new) & np.isnan(old))


OWN_RUN = "(earlier attempts)"
"""In place of a run's name: the earlier attempts of the judged run. No run can have this name."""

FIGURES = (*VALUE_COLUMNS, *DERIVED)
MOST_TENSORS = 500
MOST_POINTS = 1000

_LAST_STEP = 2**63 - 1

TRAINING_MODES = (0, 3)
"""Modes of compared rows: train and global, as indices of `watchstep.format.tensors.MODES`."""

Point = tuple[int, float]
"""A step and its value."""

Reference = dict[str, list[Point]]
"""For each tensor, points in ascending order of their steps."""


class CheckedReference(Reference):
    """A reference whose points were checked once, or the problem for which it has none.

    The parameters of rules accept it without a check, which would take seconds if many rule configs share a reference.

    Attributes:
        problem: why the reference is empty; empty if it has points.
    """

    def __init__(self, points: Reference | Iterable[tuple[str, list[Point]]] = (), problem: str = "") -> None:
        super().__init__(points)
        self.problem = problem
        self._arrays: dict[str, tuple[NDArray[np.int64], Floats]] = {}

    @classmethod
    def from_data(cls, data: Any, most_points: int) -> CheckedReference:
        """Check JSON data of an untrusted writer.

        Args:
            data: the data.
            most_points: limit of the points of all tensors.

        Raises:
            ValueError: it is not a reference, or exceeds a limit.
        """
        if not isinstance(data, dict) or not all(isinstance(points, list) for points in data.values()):
            raise ValueError("it is not a list of points by tensor")
        if len(data) > MOST_TENSORS:
            raise ValueError(f"it has {len(data)} tensors, at most {MOST_TENSORS} are allowed")
        if (count := sum(map(len, data.values()))) > most_points:
            raise ValueError(f"it has {count} points, at most {most_points} are allowed")
        return cls((name, _checked_points(name, points)) for name, points in data.items())

    @property
    def points(self) -> int:
        """The number of points of all tensors."""
        return sum(map(len, self.values()))

    def arrays(self, name: str) -> tuple[NDArray[np.int64], Floats]:
        """Return steps and values of a tensor's points; computed once."""
        if name not in self._arrays:
            self._arrays[name] = arrays_of(self[name])
        return self._arrays[name]


def arrays_of(points: list[Point]) -> tuple[NDArray[np.int64], Floats]:
    """Return the steps and values of points, each of shape (n,)."""
    steps, values = zip(*points, strict=True)
    return np.array(steps, np.int64), np.array(values, np.float64)


def _checked_points(name: str, points: list[Any]) -> list[Point]:
    """Check points without a loop in Python over them, because there may be half a million."""
    of_name = f"tensor {name[:80]!r}"
    if not 0 < len(points) <= MOST_POINTS:
        raise ValueError(f"{of_name} has {len(points)} points, 1 to {MOST_POINTS} are allowed")
    if set(map(type, points)) != {list} or set(map(len, points)) != {2}:
        raise ValueError(f"a point of {of_name} is not a step and a value")
    steps, values = zip(*points, strict=True)
    if set(map(type, steps)) != {int} or not set(map(type, values)) <= {int, float}:
        raise ValueError(f"a step or value of {of_name} is not a number")
    if min(steps) < 0 or max(steps) > _LAST_STEP:
        raise ValueError(f"a step of {of_name} is out of range")
    if not (np.diff(np.array(steps, np.int64)) > 0).all():
        raise ValueError(f"the steps of {of_name} do not ascend")
    try:
        floats = np.array(values, np.float64)
    except OverflowError:
        floats = np.array([np.inf])
    if not np.isfinite(floats).all():
        raise ValueError(f"a value of {of_name} is not finite")
    return list(zip(steps, floats.tolist(), strict=True))


def figure_of(statistics: StatisticsBatch, figure: str) -> Floats:
    """Return a statistic of `FIGURES` for each row, float64 of shape (n,)."""
    derive = DERIVED.get(figure)
    values: Floats = derive(statistics) if derive else getattr(statistics, figure)
    return values


def reference_of(rows: Block, figure: str = "rms", include: str = ".*", points: int = 100) -> Reference:
    """Build the ``reference`` parameter of ``similar_across_runs``.

    Args:
        rows: rows of the run to compare with, from `watchstep.Run.rows`. Rows in the modes train and global count, with
            shards merged, at each step of the lowest worker that has the tensor.
        figure: one of `FIGURES`.
        include: regular expression in RE2 syntax; only tensors with names that match from the start are included.
        points: maximum number of steps of a tensor, evenly spaced among the recorded steps.

    Raises:
        RuleError: the figure is unknown, ``include`` is not a valid regular expression, or there are more than 500
            tensors or 1000 points.
    """
    if figure not in FIGURES:
        raise RuleError(f"figure {figure!r} is not known", f"use one of {', '.join(FIGURES)}")
    if not 2 <= points <= MOST_POINTS:
        raise RuleError(f"points={points}", f"use 2 to {MOST_POINTS}")
    try:
        tensor_selection.check(include)
    except ValueError as error:
        raise RuleError(f"include={include[:100]!r}: {error}", "leave it out for all tensors") from error
    is_included = rows.mask_of_tensors(
        [tensor_selection.matches(include, info.name) for info in rows.catalogue]
    )
    chosen = with_merged_shards(view(rows, np.flatnonzero(is_included & is_training(rows))))
    reference = ComparedRows(chosen).reference(figure_of(chosen.statistics, figure), points)
    if len(reference) > MOST_TENSORS:
        raise RuleError(
            f"{len(reference)} tensors are too many for the parameters of a rule",
            f"choose at most {MOST_TENSORS} by 'include'",
        )
    return reference


def with_merged_shards(block: Block) -> Block:
    """Return rows with shards merged, in any order."""
    return merge_shards(block) if (block.places.shard_count > 1).any() else block


class ComparedRows:
    """The rows of a run that other runs are compared with: of each tensor and step those of the lowest worker that has the tensor.

    They are grouped once for any number of statistics.

    Args:
        block: n rows in the modes train and global, with shards merged. Their statistics are not read.
    """

    def __init__(self, block: Block) -> None:
        rows = np.flatnonzero(lowest_workers(block))
        places = block.places
        columns = (block.tensor, block.step, block.worker, block.mode, places.stage, places.replica)
        key = sort_key(*(column[rows] for column in columns))
        self._rows = rows[np.argsort(key, kind="stable")]
        self._tensor, self._step = block.tensor[self._rows], block.step[self._rows]
        self._catalogue = block.catalogue

    def reference(self, values: Floats, points: int) -> Reference:
        """Return points of each tensor at steps with a finite value, evenly spaced among them.

        Args:
            values: a statistic of the rows, shape (n,).
            points: maximum number of points of a tensor.
        """
        values = values[self._rows]
        finite = np.flatnonzero(np.isfinite(values))
        if not len(finite):
            return {}
        tensor, step = self._tensor[finite], self._step[finite]
        is_first = np.ones(len(finite), np.bool_)
        is_first[1:] = (tensor[1:] != tensor[:-1]) | (step[1:] != step[:-1])
        values, tensor, step = values[finite[is_first]], tensor[is_first], step[is_first]
        starts = np.flatnonzero(np.diff(tensor, prepend=-1))
        reference: Reference = {}
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(tensor)], strict=True):
            count = end - start
            chosen = start + np.unique(np.linspace(0, count - 1, min(points, count)).astype(np.intp))
            name = self._catalogue[tensor[start]].name
            reference[name] = list(zip(step[chosen].tolist(), values[chosen].tolist(), strict=True))
        return reference


def lowest_workers(block: Block) -> NDArray[np.bool_]:
    """Return which rows belong to the lowest worker that has the tensor at this step and mode, bool of shape (n,)."""
    if not len(block) or (block.worker == block.worker[0]).all():
        return np.ones(len(block), np.bool_)
    key = sort_key(block.step, block.mode, block.tensor)
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(key[order]) != 0]))
    worker = block.worker[order]
    lowest = np.repeat(np.minimum.reduceat(worker, starts), np.diff([*starts, len(order)]))
    is_lowest = np.empty(len(order), np.bool_)
    is_lowest[order] = worker == lowest
    return is_lowest


def is_training(block: Block) -> NDArray[np.bool_]:
    """Return which rows are in the modes train and global, bool of shape (n,)."""
    return np.isin(block.mode, TRAINING_MODES)
