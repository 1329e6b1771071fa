"""Data of pictures: binned series, heatmaps and histograms over the steps, as `watchstep.reading` and `watchstep.client` return them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Floats

Integers = NDArray[np.int64]


class SeriesPoints(Protocol):
    """Values over the steps, in points; see `watchstep.reading.binning.BinnedValues`."""

    @property
    def step(self) -> Integers:
        """First step of each point, ascending."""

    @property
    def last_step(self) -> Integers:
        """Last step of each point."""

    @property
    def mean(self) -> Floats:
        """Mean of the finite values of each point; NaN without any."""

    @property
    def min(self) -> Floats:
        """Smallest finite value of each point."""

    @property
    def max(self) -> Floats:
        """Largest finite value of each point."""

    @property
    def nonfinite(self) -> Integers:
        """Number of rows of each point without a finite value."""


@dataclass(frozen=True)
class HeatCells:
    """A figure of many tensors over the steps.

    Attributes:
        tensors: names, in the model's order; m of them.
        edges: shape (n + 1,); column i covers the steps edges[i] … edges[i + 1] - 1.
        values: shape (m, n); NaN where nothing was measured.
        nonfinite: cells with NaN or infinite elements, shape (m, n).
    """

    tensors: Sequence[str]
    edges: Integers
    values: Floats
    nonfinite: NDArray[np.bool_]


class HistogramRows(Protocol):
    """Exponent histograms of one tensor over the steps; see `watchstep.reading.queries.HistogramSeries`."""

    @property
    def edges(self) -> Integers:
        """Shape (n + 1,); row i covers the steps edges[i] … edges[i + 1] - 1."""

    @property
    def lower(self) -> Floats:
        """Shape (m,); elements of column j are between lower[j] and upper[j], ascending."""

    @property
    def upper(self) -> Floats:
        """Shape (m,)."""

    @property
    def counts(self) -> Integers:
        """Shape (n, m)."""

    @property
    def zeros(self) -> Integers:
        """Shape (n,)."""

    @property
    def nonfinite(self) -> Integers:
        """Shape (n,)."""


@dataclass(frozen=True)
class NamedSeries:
    """A line of a chart.

    Attributes:
        name: its name.
        points: its values.
        is_step: whether a value is recorded when it changes, as a learning rate is, so that it is valid until the next point. A value of any
            other line belongs to the steps of its point.
    """

    name: str
    points: SeriesPoints
    is_step: bool = False


MarkKind = Literal["fired", "resolved", "stopped", "note"]


@dataclass(frozen=True)
class PlotMark:
    """An event at a step.

    Attributes:
        step: the step.
        label: the event in a few words; of an alert, its rule; of an end, the state.
        kind: what it is; determines its colour.
    """

    step: int
    label: str
    kind: MarkKind = "note"

    @property
    def text(self) -> str:
        """The event with its step: ``nan_or_inf: bad from step 253``, ``stopped: ended after step 308``, ``bundle at step 253``."""
        relations = {"fired": ": bad from", "stopped": ": ended after"}
        return f"{self.label}{relations.get(self.kind, ' at')} step {self.step}"


@dataclass(frozen=True, kw_only=True)
class RunPicture:
    """Data of the picture of a run.

    Attributes:
        title: the run and what happened, in one line.
        losses: losses over the steps.
        statistic: the figure of the heatmap.
        heatmap: the figure by tensor and step; None if nothing of its collection was recorded.
        rates: learning rates.
        marks: events.
    """

    title: str
    losses: Sequence[NamedSeries]
    statistic: str
    heatmap: HeatCells | None
    rates: Sequence[NamedSeries]
    marks: Sequence[PlotMark]


@dataclass(frozen=True)
class DenseHistogram:
    """A histogram with a column for each power of two between its extremes, so that columns have equal distances; see `HistogramRows`."""

    edges: Integers
    lower: Floats
    upper: Floats
    counts: Integers
    zeros: Integers
    nonfinite: Integers


def dense(histogram: HistogramRows) -> DenseHistogram:
    """Add the empty columns to a histogram. Negative and positive columns end at the same smallest magnitude."""
    lower, upper = histogram.lower, histogram.upper
    near = np.minimum(np.abs(lower), np.abs(upper))
    powers = np.round(np.log2(near)).astype(np.int64) if len(near) else np.empty(0, np.int64)
    negative = upper <= 0
    first = int(powers.min()) if len(powers) else 0
    columns: dict[tuple[bool, int], int] = {}
    below = range(int(powers[negative].max()), first - 1, -1) if negative.any() else range(0)
    above = range(first, int(powers[~negative].max()) + 1) if (~negative).any() else range(0)
    for sign, side in ((True, below), (False, above)):
        for power in side:
            columns[sign, power] = len(columns)
    counts = np.zeros((len(histogram.edges) - 1, len(columns)), np.int64)
    for column, (sign, power) in enumerate(zip(negative.tolist(), powers.tolist(), strict=True)):
        counts[:, columns[sign, power]] += histogram.counts[:, column]
    signs = np.array([-1.0 if sign else 1.0 for sign, _ in columns])
    with np.errstate(over="ignore"):
        ends = [
            signs * np.ldexp(1.0, np.array([power + more for _, power in columns], np.int64))
            for more in (0, 1)
        ]
    return DenseHistogram(
        histogram.edges, np.minimum(*ends), np.maximum(*ends), counts, histogram.zeros, histogram.nonfinite
    )


def shares(histogram: HistogramRows) -> Floats:
    """Return the share of each column in the non-zero, finite elements of its row, shape (n, m); NaN for a row that was not measured."""
    counts = histogram.counts.astype(np.float64)
    totals = counts.sum(axis=1)
    is_measured = totals + histogram.zeros + histogram.nonfinite > 0
    result: Floats = np.where(is_measured[:, None], counts / np.maximum(totals, 1.0)[:, None], np.nan)
    return result


def without_finite(histogram: HistogramRows) -> NDArray[np.bool_]:
    """Return whether all measured elements of a row are NaN or infinite, shape (n,); false for a row that was not measured."""
    result: NDArray[np.bool_] = (histogram.counts.sum(axis=1) + histogram.zeros == 0) & (
        histogram.nonfinite > 0
    )
    return result


def parts(line: NamedSeries) -> list[slice]:
    """Return the ranges of points that are drawn as one connected line.

    Points are connected if no step between them was skipped: a slope over steps that were not measured would show values that nobody saw.
    Where points join several steps, a distance of one point is no gap. A line with steps is interrupted by values that are not finite only.
    """
    points = line.points
    if not len(points.step):
        return []
    width = max(1, int((points.last_step - points.step).max()) + 1)
    is_finite = np.isfinite(points.mean)
    joined = is_finite[1:] & is_finite[:-1]
    if not line.is_step:
        joined &= points.step[1:] - points.last_step[:-1] <= width
    starts = np.flatnonzero(np.append(True, ~joined))
    ends = np.append(starts[1:], len(is_finite))
    return [slice(int(a), int(b)) for a, b in zip(starts, ends, strict=True) if is_finite[a]]


def interrupted(steps: Floats, values: Floats, places: Sequence[int]) -> tuple[Floats, Floats]:
    """Return steps and values of a line with a NaN before each of the places, where it is interrupted."""
    return np.insert(steps, places, np.nan), np.insert(values, places, np.nan)


def alone(values: Floats) -> list[int]:
    """Return the places of the values without a neighbour, which a line does not show: they are drawn as points."""
    is_gap = np.concatenate([[True], np.isnan(values), [True]])
    return [int(place) for place in np.flatnonzero(~is_gap[1:-1] & is_gap[:-2] & is_gap[2:])]


def is_logarithmic(*parts: NDArray[Any]) -> bool:
    """Whether values are positive, apart from zeros, and span more than a factor of 30."""
    values = np.concatenate([part.ravel() for part in parts] or [np.empty(0)]).astype(np.float64)
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    return bool(len(positive) and (values >= 0).all() and positive.max() > 30 * positive.min())
