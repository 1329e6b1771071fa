"""Headroom: how far the elements of tensors are from the limits of number formats.

The largest and the smallest non-zero magnitude of a tensor determine how many powers of two remain to overflow and to underflow, for any
format: ``log2(largest of the format / largest magnitude)`` and ``log2(smallest magnitude / smallest normal number)``. Exponent histograms
determine which share of the elements is beyond a limit.

Limits of the formats: IEEE 754-2019, table 3.5 (binary16, binary32); Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning Training"
(arXiv:1905.12322), table 1; Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433), table 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Floats
from watchstep.format.tensors import Mode, mode_index
from watchstep.reading.columns import NO_CUT, Selection, figure_of
from watchstep.reading.index import RunIndex
from watchstep.reading.queries import HistogramSeries, edges_between

FormatState = Literal["overflow", "close", "underflow", "subnormal", "ok"]

_FIGURES = ("min", "max", "abs_min")
_CLOSE_BITS = 1.0
"""Powers of two to overflow below which a tensor is close to it: one doubling."""


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format.

    Attributes:
        name: e.g. ``fp16``.
        largest: largest finite number.
        smallest_normal: smallest normal number; below it, numbers have fewer digits.
        smallest: smallest subnormal number; about half of it and less becomes zero.
        source: where the limits are defined.
    """

    name: str
    largest: float
    smallest_normal: float
    smallest: float
    source: str


FORMATS = (
    NumberFormat("fp16", 65504.0, 2.0**-14, 2.0**-24, "IEEE 754-2019, binary16"),
    NumberFormat("bf16", (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, "arXiv:1905.12322, table 1"),
    NumberFormat("fp32", (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, "IEEE 754-2019, binary32"),
    NumberFormat("fp8_e4m3", 448.0, 2.0**-6, 2.0**-9, "arXiv:2209.05433, table 1"),
    NumberFormat("fp8_e5m2", 57344.0, 2.0**-14, 2.0**-16, "arXiv:2209.05433, table 1"),
)


@dataclass(frozen=True)
class FormatHeadroom:
    """How far a tensor is from the limits of a format.

    Attributes:
        format: name of the format.
        overflow_bits: powers of two from the largest magnitude to the largest number; negative: elements overflow. None without elements.
        underflow_bits: powers of two from the smallest normal number to the smallest magnitude; negative: elements are subnormal or zero.
        state: ``overflow``; ``close``: less than a doubling remains; ``underflow``: some magnitude is below the smallest number;
            ``subnormal``: below the smallest normal number; else ``ok``.
    """

    format: str
    overflow_bits: float | None
    underflow_bits: float | None
    state: FormatState


@dataclass(frozen=True)
class FormatShares:
    """Shares of the finite, non-zero elements beyond the limits of a format, by powers of two.

    Attributes:
        format: name of the format.
        overflow: share at or above the power of two that follows the largest number.
        subnormal: share below the smallest normal number, and not below the smallest one.
        underflow: share below the smallest number.
    """

    format: str
    overflow: float
    subnormal: float
    underflow: float


@dataclass(frozen=True)
class MagnitudeRange:
    """Extremes of one tensor's magnitudes over the steps; NaN and -1 without a finite, non-zero element.

    Attributes:
        tensor: its name.
        largest: largest magnitude.
        largest_step: first step with it.
        smallest: smallest non-zero magnitude.
        smallest_step: first step with it.
    """

    tensor: str
    largest: float
    largest_step: int
    smallest: float
    smallest_step: int


@dataclass(frozen=True)
class Magnitudes:
    """Extremes of magnitudes of tensors.

    Attributes:
        edges: int64 of shape (n + 1,); column i covers the steps edges[i] … edges[i + 1] - 1.
        largest: float64 of shape (n,), over all tensors; NaN without any.
        smallest: float64 of shape (n,), non-zero, over all tensors; NaN without any.
        tensors: one for each requested tensor, in the same order.
    """

    edges: NDArray[np.int64]
    largest: Floats
    smallest: Floats
    tensors: list[MagnitudeRange]


def headroom_of(largest: float, smallest: float) -> list[FormatHeadroom]:
    """Return the headroom of magnitudes in each of `FORMATS`; NaN for none."""
    return [_headroom(each, largest, smallest) for each in FORMATS]


def _headroom(number_format: NumberFormat, largest: float, smallest: float) -> FormatHeadroom:
    if not (largest > 0 and smallest > 0):
        return FormatHeadroom(number_format.name, None, None, "ok")
    # Logarithms are subtracted, because a quotient of extreme numbers overflows.
    over = math.log2(number_format.largest) - math.log2(largest)
    under = math.log2(smallest) - math.log2(number_format.smallest_normal)
    state: FormatState = "ok"
    if largest > number_format.largest:
        state = "overflow"
    elif over < _CLOSE_BITS:
        state = "close"
    elif smallest < number_format.smallest:
        state = "underflow"
    elif smallest < number_format.smallest_normal:
        state = "subnormal"
    return FormatHeadroom(number_format.name, over, under, state)


def shares_of(histogram: HistogramSeries, row: int = -1) -> list[FormatShares]:
    """Return the shares of the elements of one row of a histogram beyond the limits of each of `FORMATS`; 0 without elements."""
    counts = histogram.counts[row].astype(np.float64)
    magnitude = np.minimum(np.abs(histogram.lower), np.abs(histogram.upper))  # lower edge of each bin
    total = max(1.0, float(counts.sum()))
    return [
        FormatShares(
            each.name,
            float(counts[magnitude > each.largest].sum()) / total,
            float(counts[(magnitude < each.smallest_normal) & (magnitude >= each.smallest)].sum()) / total,
            float(counts[magnitude < each.smallest].sum()) / total,
        )
        for each in FORMATS
    ]


def read_magnitudes(
    index: RunIndex, tensors: list[str], columns: int, mode: Mode | None, within: tuple[int, int]
) -> Magnitudes:
    """Read the extremes of magnitudes. Those of shards need no merging: an extreme of shards is that of the whole tensor.

    Args:
        index: the run.
        tensors: names, each once.
        columns: maximum number of columns of steps.
        mode: only rows of this mode; None for all.
        within: first and last step.

    Raises:
        ConfigError: the mode does not exist.
        StoreError: the store cannot be read.
        OverBudgetError: the index's budget is exceeded.
    """
    code = None if mode is None else mode_index(mode)
    return index.consistently(lambda: _read(index, tensors, columns, code, within))


def _read(
    index: RunIndex, tensors: list[str], columns: int, mode: int | None, within: tuple[int, int]
) -> Magnitudes:
    first, last = index.step_range()
    edges = edges_between(max(first, within[0]), min(last, within[1]), columns)
    places = {name: place for place, name in enumerate(tensors)}
    place_of = np.array([places.get(info.name, -1) for info in index.tensors()] or [-1], np.int64)
    largest = _Extremes(len(tensors), edges, sign=1)
    smallest = _Extremes(len(tensors), edges, sign=-1)
    selection = Selection(_FIGURES, frozenset(tensors), int(edges[0]), int(edges[-1]) - 1)
    for part in index.scan(selection):
        magnitude = np.maximum(np.abs(figure_of(part, "min")), np.abs(figure_of(part, "max")))
        least = figure_of(part, "abs_min")
        chosen = np.isfinite(magnitude) & (least > 0)
        if mode is not None:
            chosen &= part["mode"] == mode
        rows = np.flatnonzero(chosen)
        if len(rows):
            place = place_of[part["tensor"][rows]]
            step = part["step"][rows].astype(np.int64)
            largest.add(place, step, magnitude[rows])
            smallest.add(place, step, least[rows])
    return Magnitudes(
        edges,
        largest.by_column(),
        smallest.by_column(),
        [
            MagnitudeRange(name, *largest.of_tensor(place), *smallest.of_tensor(place))
            for place, name in enumerate(tensors)
        ],
    )


class _Extremes:
    """Extremes by tensor, with their first step, and by column of steps. With sign -1, the smallest ones."""

    def __init__(self, tensors: int, edges: NDArray[np.int64], sign: int) -> None:
        self._edges, self._sign = edges, sign
        self._columns = np.full(len(edges) - 1, -np.inf)
        self._values = np.full(tensors, -np.inf)
        self._steps = np.full(tensors, -1, np.int64)

    def add(self, place: NDArray[np.int64], step: NDArray[np.int64], values: Floats) -> None:
        signed = self._sign * values
        np.maximum.at(self._columns, np.searchsorted(self._edges, step, side="right") - 1, signed)
        best = np.full(len(self._values), -np.inf)
        np.maximum.at(best, place, signed)
        rows = np.flatnonzero(signed == best[place])
        steps = np.full(len(self._values), NO_CUT)
        np.minimum.at(steps, place[rows], step[rows])
        is_better = (best > self._values) | ((best == self._values) & (steps < self._steps))
        self._values[is_better], self._steps[is_better] = best[is_better], steps[is_better]

    def by_column(self) -> Floats:
        return np.where(np.isfinite(self._columns), self._sign * self._columns, np.nan)

    def of_tensor(self, place: int) -> tuple[float, int]:
        value = float(self._values[place])
        return (self._sign * value if math.isfinite(value) else math.nan), int(self._steps[place])
