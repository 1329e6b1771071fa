"""Pictures of a tensor: a figure over the steps, and the distribution of its elements over the steps as a heatmap or as ridges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from watchstep.format.statistics import Floats
from watchstep.plots.binned import (
    HistogramRows,
    NamedSeries,
    PlotMark,
    dense,
    shares,
    without_finite,
)
from watchstep.plots.run_plot import draw_lines, draw_marks, draw_nonfinite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from watchstep.plots.plot_figure import PlotFigure

_MAX_RIDGES = 24
_MAX_LABELS = 12


def tensor_figure(
    name: str,
    statistic: str,
    lines: Sequence[NamedSeries],
    histogram: HistogramRows | None,
    marks: Sequence[PlotMark] = (),
    width: int = 900,
) -> PlotFigure:
    """Draw a tensor's figure over the steps, and below it the distribution of its elements.

    Args:
        name: name of the tensor.
        statistic: name of the figure.
        lines: the figure, one line for each worker or mode.
        histogram: the distribution; None if the tensor has none.
        marks: events.
        width: width in pixels.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    from watchstep.plots.plot_figure import PLAIN, label, new_figure

    figure = new_figure(width, 300 if histogram is None else 560)
    count = 1 if histogram is None else 2
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    figure.suptitle(label(name, width // 9), fontsize=11, x=0.01, ha="left", fontweight="bold", **PLAIN)
    draw_lines(panels[0], lines, statistic)
    draw_marks(panels[0], marks, with_labels=True)
    if histogram is not None:
        draw_histogram(panels[1], histogram)
        draw_marks(panels[1], marks)
    panels[-1].set_xlabel("step", fontsize=9)
    return figure


def draw_histogram(axes: Axes, histogram: HistogramRows) -> None:
    """Draw the distribution over the steps: one column per range of steps, one row per power of two, coloured by the share of elements."""
    from watchstep.plots.plot_figure import HEAT, PLAIN

    histogram = dense(histogram)
    share = shares(histogram)
    measured = np.where(share > 0, share, np.nan)
    axes.set_title("elements by power of two, share of a step", fontsize=9, loc="left")
    if not share.shape[1]:
        axes.text(0.01, 0.8, "no finite element other than zero", transform=axes.transAxes, fontsize=8)
        return
    rows = np.arange(share.shape[1] + 1) - 0.5
    mesh = axes.pcolormesh(
        histogram.edges, rows, np.ma.masked_invalid(measured.T), cmap=HEAT, vmin=0, rasterized=True
    )
    bad = without_finite(histogram)
    if bad.any():
        draw_nonfinite(axes, histogram.edges, rows[[0, -1]], bad[None, :])
    ticks = _ticks(histogram)
    axes.set_yticks(ticks, [power_label(histogram, tick) for tick in ticks], fontsize=7, **PLAIN)
    axes.tick_params(labelsize=8, axis="x")
    if np.isfinite(measured).any():
        axes.figure.colorbar(mesh, ax=axes, pad=0.01).ax.tick_params(labelsize=7)


def ridge_figure(name: str, histogram: HistogramRows, width: int = 900) -> PlotFigure:
    """Draw the distribution at up to 24 ranges of steps, one ridge each, the first at the top.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    from matplotlib import colormaps

    from watchstep.plots.plot_figure import HEAT, PLAIN, label, new_figure

    histogram = dense(histogram)
    share = shares(histogram)
    filled = np.flatnonzero(np.isfinite(share).any(axis=1)) if share.size else np.empty(0, np.intp)
    chosen = filled[np.unique(np.linspace(0, len(filled) - 1, min(_MAX_RIDGES, len(filled))).astype(int))]
    figure = new_figure(width, 160 + 22 * len(chosen))
    axes = figure.subplots()
    axes.spines[["top", "right", "left"]].set_visible(False)
    columns = np.arange(share.shape[1])
    highest = float(np.nanmax(share[chosen])) if len(chosen) else 1.0
    for position, row in enumerate(chosen):
        base = -float(position)
        curve = base + 2.2 * share[row] / highest
        colour = colormaps[HEAT](0.9 * position / max(1, len(chosen) - 1))
        axes.fill_between(columns, base, curve, color=colour, alpha=0.85, linewidth=0, zorder=position)
        axes.plot(columns, curve, color="white", linewidth=0.9, zorder=position)
    axes.set_yticks(
        [-float(position) for position in range(len(chosen))],
        [f"step {histogram.edges[row]}" for row in chosen],
        fontsize=7,
    )
    ticks = _ticks(histogram)
    axes.set_xticks(ticks, [power_label(histogram, tick) for tick in ticks], fontsize=8, **PLAIN)
    axes.set_xlabel("elements by power of two", fontsize=9)
    axes.set_title(label(name, width // 9), fontsize=11, loc="left", fontweight="bold", **PLAIN)
    return figure


def power_label(histogram: HistogramRows, column: int) -> str:
    """Return the power of two of a column, with its sign, e.g. ``-2^-7``; the end that is nearer to zero."""
    low, high = float(histogram.lower[column]), float(histogram.upper[column])
    near = low if abs(low) < abs(high) else high
    sign = "-" if high <= 0 else ""
    return f"{sign}2^{round(math.log2(abs(near)))}" if near else "0"


def _ticks(histogram: HistogramRows) -> list[int]:
    columns = len(histogram.lower)
    return list(range(0, columns, max(1, -(-columns // _MAX_LABELS))))


def zero_shares(histogram: HistogramRows) -> tuple[Floats, Floats]:
    """Return the shares of zeros and of NaN and infinite elements in each row, shape (n,) each; NaN for a row without elements."""
    totals = histogram.counts.sum(axis=1) + histogram.zeros + histogram.nonfinite
    with np.errstate(invalid="ignore"):
        zero, bad = (
            np.where(totals > 0, part / np.maximum(totals, 1), np.nan)
            for part in (histogram.zeros, histogram.nonfinite)
        )
    return zero, bad
