"""The picture of a run: losses with events, a heatmap of layers and steps, and learning rates."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Floats
from watchstep.plots.binned import (
    HeatCells,
    Integers,
    NamedSeries,
    PlotMark,
    RunPicture,
    alone,
    interrupted,
    is_logarithmic,
    parts,
)
from watchstep.plots.heat import NONFINITE, OUTLIERS, scale_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from watchstep.plots.plot_figure import PlotFigure

_LOSSES, _RATES, _MARGIN = 230, 130, 60
_ROW, _LEAST, _MOST = 15, 110, 560
"""Heights in pixels: of the panels, and of a heatmap by its rows."""

_MAX_TICKS = 40
_MAX_LEGEND = 8


def run_figure(picture: RunPicture, width: int = 1000) -> PlotFigure:
    """Draw a run.

    Args:
        picture: the data.
        width: width in pixels.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    from watchstep.plots.plot_figure import PLAIN, new_figure, shortened

    heights: list[int] = []
    if picture.losses or picture.heatmap is None:
        heights.append(_LOSSES)
    if picture.heatmap is not None:
        heights.append(min(_MOST, max(_LEAST, _ROW * len(picture.heatmap.tensors))))
    if picture.rates:
        heights.append(_RATES)
    figure = new_figure(width, sum(heights) + _MARGIN)
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[
        :, 0
    ].tolist()
    title = "\n".join(textwrap.wrap(shortened(picture.title, 3 * width // 9), width // 9))
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", fontweight="bold", **PLAIN)
    last = _last_step(picture)
    panels[-1].set_xlabel("step", fontsize=9)
    if picture.losses or picture.heatmap is None:
        axes = panels.pop(0)
        draw_lines(axes, picture.losses, "loss")
        draw_marks(axes, picture.marks, with_labels=True)
    if picture.heatmap is not None:
        axes = panels.pop(0)
        draw_heatmap(axes, picture.heatmap, picture.statistic)
        draw_marks(axes, picture.marks)
    if picture.rates:
        axes = panels.pop(0)
        draw_lines(axes, picture.rates, "learning rate", last)
        draw_marks(axes, picture.marks)
    return figure


def _last_step(picture: RunPicture) -> int:
    ends = [int(line.points.last_step[-1]) for line in picture.losses if len(line.points.last_step)]
    heat = [] if picture.heatmap is None else [int(picture.heatmap.edges[-1]) - 1]
    return max([*ends, *heat, *(mark.step for mark in picture.marks)], default=0)


def draw_lines(axes: Axes, lines: Sequence[NamedSeries], name: str, last_step: int | None = None) -> None:
    """Draw series: their means, the range of values that each point covers, and crosses where values are not finite.

    Args:
        axes: where to draw.
        lines: the series.
        name: label of the vertical axis.
        last_step: step up to which the last value of a line with steps is valid; None for its own last step.
    """
    from watchstep.plots.plot_figure import (
        CYCLE,
        PLAIN,
        VERMILLION,
        add_legend,
        label,
        legend_label,
        style_axes,
    )

    style_axes(axes)
    axes.set_ylabel(label(name, 40), fontsize=9, **PLAIN)
    if lines and is_logarithmic(*(line.points.mean for line in lines)):
        axes.set_yscale("log")
    bad: list[Floats] = []
    for position, line in enumerate(lines):
        colour = CYCLE[position % len(CYCLE)]
        points = line.points
        steps, means = points.step.astype(np.float64), _drawable(points.mean)
        name_of_line = legend_label(line.name) if position < _MAX_LEGEND else None
        if line.is_step:
            if last_step is not None and len(steps):
                steps, means = np.append(steps, max(last_step, steps[-1])), np.append(means, means[-1])
            axes.plot(steps, means, color=colour, linewidth=1.3, drawstyle="steps-post", label=name_of_line)
        else:
            x, y = interrupted(steps, means, [part.start for part in parts(line)[1:]])
            axes.plot(x, y, color=colour, linewidth=1.3, marker=".", markevery=alone(y), label=name_of_line)
        if (points.last_step > points.step).any():
            for part in parts(line):
                axes.fill_between(
                    points.step[part],
                    _drawable(points.min)[part],
                    _drawable(points.max)[part],
                    color=colour,
                    alpha=0.18,
                    linewidth=0,
                )
        bad.append(points.step[points.nonfinite > 0].astype(np.float64))
    bad_steps = np.unique(np.concatenate(bad)) if bad else np.empty(0)
    if len(bad_steps):
        height = axes.get_xaxis_transform()
        crosses = np.full(len(bad_steps), 0.97)
        axes.plot(bad_steps, crosses, "x", color=VERMILLION, transform=height, label="not finite")
    if lines:
        add_legend(axes, frameon=False)


def draw_heatmap(axes: Axes, heatmap: HeatCells, statistic: str) -> None:
    """Draw a heatmap with one row per tensor. Cells with NaN or infinity are red."""
    from matplotlib.colors import LogNorm, Normalize

    from watchstep.plots.plot_figure import HEAT, PLAIN, label

    values = heatmap.values
    scale = scale_of(values, OUTLIERS)
    rows = np.arange(len(heatmap.tensors) + 1) - 0.5
    norm = LogNorm(scale.low, scale.high) if scale.is_log else Normalize(scale.low, scale.high)
    drawn = np.maximum(values, scale.low) if scale.is_log else values
    mesh = axes.pcolormesh(
        heatmap.edges, rows, np.ma.masked_invalid(drawn), cmap=HEAT, norm=norm, rasterized=True
    )
    has_bad = bool(heatmap.nonfinite.any())
    if has_bad:
        draw_nonfinite(axes, heatmap.edges, rows, heatmap.nonfinite)
    axes.set_ylim(rows[-1], rows[0])
    every = -(-len(heatmap.tensors) // _MAX_TICKS)
    ticks = range(0, len(heatmap.tensors), max(every, 1))
    names = short_names(heatmap.tensors)
    axes.set_yticks(list(ticks), [label(names[tick], 44) for tick in ticks], fontsize=7, **PLAIN)
    axes.tick_params(labelsize=8, axis="x")
    red_text = "; red: NaN or infinite" if has_bad else ""
    axes.set_title(label(f"{statistic} by layer{red_text}", 100), fontsize=9, loc="left", **PLAIN)
    if np.isfinite(values).any():
        middle = np.sqrt(scale.low * scale.high) if scale.is_log else (scale.low + scale.high) / 2
        shown = [scale.low, middle, scale.high]  # those that matplotlib chooses overlap on less than a decade
        bar = axes.figure.colorbar(mesh, ax=axes, pad=0.01, extend="both", ticks=shown, format="%.3g")
        bar.ax.minorticks_off()
        bar.ax.tick_params(labelsize=7)


def draw_nonfinite(axes: Axes, edges: Integers, rows: NDArray[Any], nonfinite: NDArray[np.bool_]) -> None:
    """Draw cells with NaN or infinite elements in red over a heatmap."""
    from matplotlib.colors import ListedColormap

    red = np.ma.masked_where(~nonfinite, np.ones(nonfinite.shape))
    axes.pcolormesh(edges, rows, red, cmap=ListedColormap([f"#{NONFINITE}"]), rasterized=True)


def draw_marks(axes: Axes, marks: Sequence[PlotMark], *, with_labels: bool = False) -> None:
    """Draw events as vertical lines."""
    from watchstep.plots.plot_figure import BLACK, GREEN, GREY, add_legend, legend_label

    colours = {"fired": BLACK, "resolved": GREEN, "stopped": GREY, "note": GREY}
    for position, mark in enumerate(marks):
        named = with_labels and position < _MAX_LEGEND
        axes.axvline(
            mark.step,
            color=colours[mark.kind],
            linewidth=1.2,
            linestyle="--" if mark.kind == "stopped" else ":" if mark.kind == "note" else "-",
            label=legend_label(mark.text) if named else None,
        )
    if with_labels and marks:
        add_legend(axes, frameon=False)


def short_names(names: Sequence[str]) -> list[str]:
    """Return names without the suffix that all of them have, e.g. ``:gradient``."""
    suffixes = {name.rpartition(":")[2] for name in names if ":" in name}
    if len(suffixes) == 1 and all(":" in name for name in names):
        return [name.rpartition(":")[0] for name in names]
    return list(names)


def _drawable(values: Floats) -> Floats:
    """Return values whose axis does not overflow."""
    return np.clip(values, -1e300, 1e300)
