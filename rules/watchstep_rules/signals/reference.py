"""Comparison with another run: a compact record of its statistics, and whether two records of a tensor can be close element by element.

If elements are within ``atol + rtol * |old|`` of each other, these statistics stay within bounds. Statistics outside the bounds rule
closeness out; statistics within the bounds do not prove it.

- ``x - atol - rtol * |x|`` and ``x + atol + rtol * |x|`` increase with x if ``rtol < 1``, so the smallest and the largest element
  move by no more than their own tolerance.
- The mean moves by at most the mean tolerance, ``atol + rtol * mean |old|``; so does the mean magnitude.
- The root mean square moves by at most the rms of the tolerances, ``atol + rtol * rms(old)``, by the triangle inequality.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import RuleError
from watchstep.format.block import Block, sort_key
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


FIGURES = (*VALUE_COLUMNS, *DERIVED)
MOST_TENSORS = 500
MOST_POINTS = 1000

Point = tuple[int, float]
"""A step and its value."""

Reference = dict[str, list[Point]]
"""For each tensor, points in ascending order of their steps."""


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
    chosen = merge_shards(
        rows.where(
            rows.mask_of_tensors([tensor_selection.matches(include, info.name) for info in rows.catalogue])
            & is_training(rows)
        )
    )
    values = figure_of(chosen.statistics, figure)
    reference: Reference = {}
    for tensor in np.unique(chosen.tensor):
        tensor_rows = np.flatnonzero((chosen.tensor == tensor) & np.isfinite(values))
        if not len(tensor_rows):
            continue
        tensor_rows = tensor_rows[lowest_workers(chosen)[tensor_rows]]
        tensor_rows = tensor_rows[np.unique(chosen.step[tensor_rows], return_index=True)[1]]
        chosen_points = np.unique(
            np.linspace(0, len(tensor_rows) - 1, min(points, len(tensor_rows))).astype(np.intp)
        )
        kept = tensor_rows[chosen_points]
        points_of_tensor = zip(chosen.step[kept].tolist(), values[kept].tolist(), strict=True)
        reference[chosen.catalogue[tensor].name] = list(points_of_tensor)
    if len(reference) > MOST_TENSORS:
        raise RuleError(
            f"{len(reference)} tensors are too many for the parameters of a rule",
            f"choose at most {MOST_TENSORS} by 'include'",
        )
    return reference


def lowest_workers(block: Block) -> NDArray[np.bool_]:
    """Return which rows belong to the lowest worker that has the tensor at this step and mode, bool of shape (n,)."""
    key = sort_key(block.step, block.mode, block.tensor)
    _, group = np.unique(key, return_inverse=True)
    lowest = np.full(int(group.max()) + 1 if len(group) else 0, np.iinfo(np.int64).max)
    np.minimum.at(lowest, group, block.worker.astype(np.int64))
    return np.asarray(block.worker == lowest[group])


def is_training(block: Block) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which rows are in the modes train and global, bool of shape (n,)."""
    return np.asarray((block.mode == 0) | (block.mode == 3))
