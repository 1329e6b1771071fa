"""The picture of an alert: the series that its rule looked at, with the threshold, around the step at which it fired.

It is drawn from plain data, so that a service can draw it from rows that it has read already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from watchstep.format.statistics import Floats
from watchstep.plots.binned import alone, interrupted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from watchstep.plots.plot_figure import PlotFigure

WIDTH, HEIGHT = 800, 400
_LARGEST, _SMALLEST = 1e300, 1e-300
"""Limits of what is drawn. Beyond, the margins of an axis would overflow."""

_MOST_POINTS = 80
"""Number of values up to which each has a point."""

_DECADES = 2.5
"""Ratio of the largest to the smallest value, as a power of ten, from which an axis is logarithmic."""


@dataclass(frozen=True, kw_only=True)
class AlertEvidence:
    """Data of the picture of one alert.

    Attributes:
        rule: name of the rule, or of its config.
        tensor: name of the tensor; empty for a finding about the whole run.
        figure: what ``values`` are, e.g. ``l2``.
        steps: steps of the values, ascending; n of them.
        values: n values; None, NaN or infinite for values that are not finite.
        step: the step of the finding.
        thresholds: the threshold at each step, n values with None where there is none; or one number for all steps; or None.
        usual_range: lower and upper end of the tensor's earlier values; None if unknown.
        stopped_at: last step of a stopped run; None if it was not stopped.
        message: the finding in one line.
        run: name of the run.
    """

    rule: str
    tensor: str
    figure: str
    steps: Sequence[int]
    values: Sequence[float | None]
    step: int
    thresholds: Sequence[float | None] | float | None = None
    usual_range: tuple[float, float] | None = None
    stopped_at: int | None = None
    message: str = ""
    run: str = ""


def alert_png(evidence: AlertEvidence, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    """Draw the picture as a small PNG.

    Args:
        evidence: the data.
        width: width in pixels.
        height: height in pixels.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return alert_figure(evidence, width, height).encode_small()


def alert_figure(evidence: AlertEvidence, width: int = WIDTH, height: int = HEIGHT) -> PlotFigure:
    """Draw the picture; arguments and errors as for `alert_png`."""
    from watchstep.plots.plot_figure import PLAIN, add_legend, label, new_figure, shortened, style_axes

    figure = new_figure(width, height)
    axes = figure.subplots()
    style_axes(axes)
    draw_evidence(axes, evidence)
    place = f"{evidence.run} · " if evidence.run else ""
    figure.suptitle(
        label(f"{place}{evidence.rule}: bad from step {evidence.step}", width // 9),
        fontsize=11,
        x=0.01,
        ha="left",
        fontweight="bold",
        **PLAIN,
    )
    subtitle = evidence.message or evidence.tensor
    axes.set_title(shortened(subtitle, width // 7), fontsize=9, loc="left", **PLAIN)
    axes.set_xlabel("step", fontsize=9)
    add_legend(axes, framealpha=0.85, edgecolor="none")
    return figure


def draw_evidence(axes: Axes, evidence: AlertEvidence) -> None:
    """Draw series, threshold, usual range and the step at which the rule fired into axes."""
    from watchstep.plots.plot_figure import BLACK, BLUE, GREY, PLAIN, VERMILLION, label, legend_label

    steps = np.asarray(evidence.steps, np.float64)
    values = _numbers(evidence.values)
    thresholds = _thresholds(evidence, len(steps))
    finite = np.isfinite(values)
    scale_axis(axes, [values, thresholds, np.asarray(evidence.usual_range or (), np.float64)])
    if evidence.usual_range is not None:
        low, high = (float(np.clip(end, -_LARGEST, _LARGEST)) for end in evidence.usual_range)
        axes.axhspan(low, high, color=BLUE, alpha=0.10, linewidth=0, label="usual range")
    name = evidence.figure if not evidence.tensor else f"{evidence.figure} of {evidence.tensor}"
    gaps = [int(place) for place in np.flatnonzero(np.diff(steps) > 1) + 1]
    x, y = interrupted(steps, values, gaps)
    axes.plot(
        x,
        y,
        color=BLUE,
        linewidth=1.4,
        marker="o",
        markersize=3,
        markevery=None if len(steps) <= _MOST_POINTS else alone(y),
        label=legend_label(name, 64),
    )
    _draw_thresholds(axes, steps, thresholds)
    if not finite.all():
        axes.plot(
            steps[~finite],
            np.full(int((~finite).sum()), 0.97),
            linestyle="none",
            marker="x",
            color=VERMILLION,
            transform=axes.get_xaxis_transform(),
            label="not finite",
        )
    axes.axvline(evidence.step, color=BLACK, linewidth=1.3, label=f"bad from step {evidence.step}")
    if evidence.stopped_at is not None:
        axes.axvline(
            evidence.stopped_at,
            color=GREY,
            linewidth=1.2,
            linestyle="--",
            label=f"ended after step {evidence.stopped_at}",
        )
    ends = [evidence.step, *steps[[0, -1]]] if len(steps) else [evidence.step]
    # At the size of the largest steps, float64 has no numbers half a step apart.
    margin = max(0.5, 0.02 * (max(ends) - min(ends)), 1e-9 * max(ends))
    last = max(ends) if evidence.stopped_at is None else max(*ends, evidence.stopped_at)
    axes.set_xlim(min(ends) - margin, last + margin)
    axes.set_ylabel(label(evidence.figure, 40), fontsize=9, **PLAIN)


def _draw_thresholds(axes: Axes, steps: Floats, thresholds: Floats) -> None:
    from watchstep.plots.plot_figure import ORANGE

    limits = np.unique(thresholds[np.isfinite(thresholds)])
    if not len(limits):
        return
    if len(limits) == 1:
        text = f"threshold {limits[0]:.4g}"
        axes.axhline(float(limits[0]), color=ORANGE, linewidth=1.4, linestyle="--", label=text)
        return
    axes.plot(
        steps,
        thresholds,
        color=ORANGE,
        linewidth=1.4,
        linestyle="--",
        drawstyle="steps-mid",
        label="threshold",
    )


def scale_axis(axes: Axes, parts: Sequence[Floats]) -> None:
    """Make the vertical axis logarithmic if the values span several powers of ten and are not negative."""
    values = np.concatenate([part.ravel() for part in parts])
    values = values[np.isfinite(values)]
    sizes = np.abs(values[values != 0])
    if not len(sizes) or math.log10(sizes.max()) - math.log10(sizes.min()) < _DECADES:
        return
    if (values > 0).all():
        axes.set_yscale("log")
    elif np.log10(sizes.max()) - np.log10(np.median(sizes)) > _DECADES / 2 or (values >= 0).all():
        axes.set_yscale("symlog", linthresh=max(float(sizes.min()), float(sizes.max()) * 1e-12))


def _numbers(values: Sequence[float | None]) -> Floats:
    numbers = np.array([math.nan if value is None else value for value in values], np.float64)
    numbers[~np.isfinite(numbers)] = math.nan
    small = (numbers != 0) & (np.abs(numbers) < _SMALLEST)
    numbers[small] = 0.0
    return np.clip(numbers, -_LARGEST, _LARGEST)


def _thresholds(evidence: AlertEvidence, count: int) -> Floats:
    given = evidence.thresholds
    if given is None:
        return np.full(max(count, 1), math.nan)
    if isinstance(given, int | float):
        return _numbers([float(given)] * max(count, 1))
    return _numbers(given)
