"""Rows that have a given figure: a tensor whose elements are few numbers, each so many times.

A row's other figures follow from the same elements, so they fit together: a tensor of n elements whose mean magnitude is
v has half of them at v and half at -v, so its root mean square is v as well, its norm v * sqrt(n), its mean close to 0.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from watchstep.format.statistics import Histograms, StatisticsBatch, merge_rows, scalars

Elements = list[tuple[float, int]]
"""Numbers, and how many elements are that."""

_SPREAD = ("abs_mean", "rms", "std", "variance", "l1", "l2", "abs_max")
_SAME = ("mean", "min", "max")
_COUNTED = ("nan", "pos_inf", "neg_inf", "zero", "zero_share", "nonfinite_share")
FIGURES = (*_SAME, *_SPREAD, *_COUNTED)
"""The figures that a series may be given by."""


def figure_is_known(figure: str) -> bool:
    """Whether a series may be given by it."""
    return figure in FIGURES


def statistics_with(figure: str, values: list[float], count: int) -> StatisticsBatch:
    """One row for each value.

    Args:
        figure: one of `FIGURES`.
        values: what it is; NaN or infinity give a tensor one element of which is that.
        count: elements of the tensor.

    Raises:
        ValueError: no tensor of so many elements has that figure.
    """
    return _rows([elements_with(figure, value, count) for value in values])


def elements_with(figure: str, value: float, count: int) -> Elements:
    """The elements of one row, as of `statistics_with`.

    Raises:
        ValueError: no tensor of so many elements has that figure.
    """
    if not math.isfinite(value):
        return [(value, 1), *_spread(1.0, count - 1)]
    if figure in _SAME:
        return [(value, count)]
    if value < 0:
        raise ValueError(f"{figure} {value:g} cannot be: it is never negative")
    if figure in _COUNTED:
        return _counted(figure, value, count)
    return _spread(_magnitude(figure, value, count), count)


def _spread(magnitude: float, count: int) -> Elements:
    """Half of them above zero, half below."""
    return [(magnitude, (count + 1) // 2), (-magnitude, count // 2)]


def _magnitude(figure: str, value: float, count: int) -> float:
    if figure in {"std", "variance"}:
        if count == 1 and value > 0:
            raise ValueError(f"{figure} {value:g} cannot be: the tensor has one element; give it a shape")
        spread = math.sqrt(1 - 1 / count**2) if count % 2 and count > 1 else 1.0  # what an odd one takes away
        return (math.sqrt(value) if figure == "variance" else value) / spread
    return {"l1": value / count, "l2": value / math.sqrt(count)}.get(figure, value)


def _counted(figure: str, value: float, count: int) -> Elements:
    share = value * count if figure.endswith("_share") else value
    hit = round(share)
    if hit > count or (not figure.endswith("_share") and hit != share):
        raise ValueError(f"{figure} {value:g} cannot be: the tensor has {count} elements")
    number = {"pos_inf": math.inf, "neg_inf": -math.inf, "zero": 0.0, "zero_share": 0.0}.get(figure, math.nan)
    return [(number, hit), *_spread(1.0, count - hit)]


def _rows(rows: list[Elements]) -> StatisticsBatch:
    held = [[pair for pair in elements if pair[1]] for elements in rows]
    pairs = [pair for elements in held for pair in elements]
    group = np.repeat(np.arange(len(held)), [len(elements) for elements in held])
    return merge_rows(_repeated([pair[0] for pair in pairs], [pair[1] for pair in pairs]), group, len(held))


def _repeated(values: list[float], times: list[int]) -> StatisticsBatch:
    """Tensors of equal elements."""
    one, many = scalars(values), np.asarray(times, np.int64)
    bins = one.histogram
    owner = np.repeat(np.arange(len(many)), np.diff(bins.offsets))
    with np.errstate(over="ignore"):
        abs_sum, square_sum = one.abs_sum * many, one.square_sum * many
    return replace(
        one,
        count=one.count * many,
        nan=one.nan * many,
        pos_inf=one.pos_inf * many,
        neg_inf=one.neg_inf * many,
        zero=one.zero * many,
        negative=one.negative * many,
        abs_sum=abs_sum,
        square_sum=square_sum,
        histogram=Histograms(bins.offsets, bins.bins, bins.counts * many[owner]),
    )
