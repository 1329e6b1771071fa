"""Charts as HTML that needs no script and no library: line charts, heatmaps, bars, tables and lanes of alerts.

A chart is a grid of an axis, a plot that is stretched to the width of the page, and a row of steps. Text is not stretched, so that it
is readable on a narrow screen. Positions are attributes of SVG and colours are classes of ``chart.css``: no element has a ``style``, which
a strict Content-Security-Policy would refuse. All names are escaped.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Floats
from watchstep.platform.terminal_text import printable
from watchstep.plots.binned import (
    HeatCells,
    HistogramRows,
    NamedSeries,
    PlotMark,
    dense,
    is_logarithmic,
    parts,
    shares,
    without_finite,
)
from watchstep.plots.heat import OUTLIERS, HeatScale, heat_png, scale_of
from watchstep.plots.run_plot import short_names
from watchstep.plots.tensor_plot import power_label

_UNITS = 1000
"""Width and height of a plot in units of its own; it is stretched to the size on the screen."""

_HEIGHT = 190
_COLOURS = 6
_ROW, _LEAST, _MOST = 13, 60, 620
_LABEL = 13.5
_MAX_NAME = 60

_BAR = 18

LaneState = Literal["pending", "fired", "resolved"]


@cache
def chart_css() -> str:
    """Return the style sheet of charts."""
    return (Path(__file__).parent / "chart.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class LineChart:
    """Series over the steps.

    Attributes:
        title: heading.
        lines: the series.
        marks: events, drawn as vertical lines.
        limits: thresholds with their names, drawn as horizontal lines.
        usual: lower and upper end of the usual range; None if unknown.
        steps: first and last step of the axis; None for those of the lines and marks.
    """

    title: str
    lines: Sequence[NamedSeries]
    marks: Sequence[PlotMark] = ()
    limits: Sequence[tuple[str, float]] = ()
    usual: tuple[float, float] | None = None
    steps: tuple[int, int] | None = None

    def as_html(self, number: int = -1) -> str:
        """Return the chart.

        Args:
            number: position of the chart in the data of the page; -1 if the page has none.
        """
        span = self.span
        if not self.lines or span is None:
            return _figure(self.title, '<p class="ws-empty">Nothing was recorded.</p>')
        scale = _ValueScale.of(self)
        shapes = [f'<line class="ws-rule" x1="0" x2="{_UNITS}" y1="{y}" y2="{y}"/>' for y, _ in scale.ticks()]
        if self.usual is not None:
            low, high = (scale.position(np.array([end]))[0] for end in self.usual)
            shapes.append(_rect("ws-usual", 0, high, _UNITS, max(low - high, 2.0)))
        for position, line in enumerate(self.lines):
            shapes += _line_shapes(line, position % _COLOURS, span, scale)
        for _, limit in self.limits:
            y = scale.position(np.array([limit]))[0]
            shapes.append(f'<line class="ws-limit" x1="0" x2="{_UNITS}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes += _mark_shapes(self.marks, span)
        labels = [(y / _UNITS * _HEIGHT, text) for y, text in scale.ticks()]
        body = _grid(_axis(labels, _HEIGHT), _svg(shapes, _HEIGHT), span, number)
        return _figure(self.title, body + self._legend())

    def _legend(self) -> str:
        entries = [(f"ws-c{i % _COLOURS}", line.name) for i, line in enumerate(self.lines)]
        entries += [("ws-limit", f"{name} {value:.4g}") for name, value in self.limits]
        entries += [("ws-usual", "usual range")] if self.usual is not None else []
        bad = any((line.points.nonfinite > 0).any() for line in self.lines)
        entries += [("ws-bad", "not finite")] if bad else []
        return _legend(entries + mark_entries(self.marks, self.span))

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last step of the axis; None for a chart without steps."""
        if self.steps is not None:
            return self.steps
        ends = [
            int(end) for line in self.lines for end in (*line.points.step[:1], *line.points.last_step[-1:])
        ]
        ends += [mark.step for mark in self.marks] if ends else []
        return (min(ends), max(ends)) if ends else None

    def data(self) -> dict[str, Any]:
        """Return the values of its points, JSON-ready, for a script that shows them."""
        return {
            "kind": "lines",
            "span": self.span,
            "lines": [
                {
                    "name": line.name,
                    "step": line.points.step.tolist(),
                    "last": line.points.last_step.tolist(),
                    "mean": rounded(line.points.mean),
                    "bad": line.points.nonfinite.tolist(),
                    "valid": line.is_step,
                }
                for line in self.lines
            ],
        }


@dataclass(frozen=True)
class HeatChart:
    """A figure by row and range of steps.

    Attributes:
        title: heading.
        edges: shape (n + 1,); column i covers the steps edges[i] … edges[i + 1] - 1.
        names: names of the rows, m of them, the first one at the top.
        values: shape (m, n); NaN where nothing was measured.
        bad: cells with NaN or infinite elements, shape (m, n); None for no cell.
        marks: events, drawn as vertical lines.
        labels: text at the axis for each row; by default its name.
        missing: text about a cell without a value.
    """

    title: str
    edges: NDArray[np.int64]
    names: Sequence[str]
    values: Floats
    bad: NDArray[np.bool_] | None = None
    marks: Sequence[PlotMark] = ()
    labels: Sequence[str] = ()
    missing: str = "not measured"

    @classmethod
    def of_tensors(cls, title: str, heatmap: HeatCells, marks: Sequence[PlotMark] = ()) -> HeatChart:
        """Make the chart of a heatmap."""
        names = heatmap.tensors
        return cls(title, heatmap.edges, names, heatmap.values, heatmap.nonfinite, marks, short_names(names))

    @classmethod
    def of_histogram(cls, title: str, histogram: HistogramRows, marks: Sequence[PlotMark] = ()) -> HeatChart:
        """Make the chart of a distribution: one row per power of two, coloured by the share of a step's elements."""
        histogram = dense(histogram)
        share = shares(histogram)[:, ::-1].T
        columns = range(len(histogram.lower) - 1, -1, -1)
        names = [f"{histogram.lower[column]:.4g} to {histogram.upper[column]:.4g}" for column in columns]
        labels = [power_label(histogram, column) for column in columns]
        bad = np.broadcast_to(without_finite(histogram), share.shape)
        return cls(
            title,
            histogram.edges,
            names,
            np.where(share > 0, share, np.nan),
            bad,
            marks,
            labels,
            "no element, or not measured",
        )

    @property
    def height(self) -> int:
        """Height in pixels."""
        return int(min(_MOST, max(_LEAST, _ROW * len(self.names))))

    @property
    def scale(self) -> HeatScale:
        """Range of the colours."""
        return scale_of(self.values, OUTLIERS)

    def as_html(self, number: int = -1) -> str:
        """Return the chart; ``number`` as for `LineChart.as_html`."""
        if not len(self.names) or not self.values.size:
            return _figure(self.title, '<p class="ws-empty">Nothing was recorded.</p>')
        scale, height = self.scale, self.height
        row_height = height / len(self.names)
        every = max(1, math.ceil(_LABEL / row_height))
        names = self.labels or self.names
        labels = [((row + 0.5) * row_height, names[row]) for row in range(0, len(names), every)]
        span = int(self.edges[0]), int(self.edges[-1]) - 1
        picture = f'<img alt="" height="{height}" src="{png_url(heat_png(self.values, scale, self.bad))}">'
        marks = _mark_shapes(self.marks, (span[0], span[1] + 1), offset=0.5)
        body = _grid(_axis(labels, height), picture + _svg(marks, height), span, number, named=True)
        ramp = png_url(heat_png(np.linspace(0.0, 1.0, 64)[None, :], HeatScale(0.0, 1.0, is_log=False)))
        has_bad = self.bad is not None and bool(self.bad.any())
        red = [("ws-bad", "NaN or infinite")] if has_bad else []
        finite = self.values[np.isfinite(self.values)]
        low = f"{'≤ ' if len(finite) and finite.min() < scale.low else ''}{scale.low:.3g}"
        high = f"{'≥ ' if len(finite) and finite.max() > scale.high else ''}{scale.high:.3g}"
        colours = f'<li>{low}<img class="ws-scale" alt="to" src="{ramp}">{high}</li>'
        return _figure(self.title, body + _legend(red + mark_entries(self.marks, span), colours))

    def data(self) -> dict[str, Any]:
        """Return the values of its cells, JSON-ready, for a script that shows them.

        A cell is a number of 16 bits: 0 if nothing was measured, 1 for NaN or infinite elements, else 2 to 65535 on the scale.
        """
        scale = scale_of(self.values)
        positions = scale.positions(self.values)
        codes = np.where(np.isnan(positions), 0, 2 + np.round(np.nan_to_num(positions) * 65533))
        if self.bad is not None:
            codes[self.bad] = 1
        return {
            "kind": "heat",
            "edges": self.edges.tolist(),
            "names": list(self.names),
            "missing": self.missing,
            "low": scale.low,
            "high": scale.high,
            "log": scale.is_log,
            "cells": base64.b64encode(codes.astype("<u2").tobytes()).decode(),
        }


@dataclass(frozen=True)
class BarChart:
    """Values by name, as horizontal bars.

    Attributes:
        title: heading.
        values: names and values, the first one at the top. The bars have the lengths of the values' magnitudes.
    """

    title: str
    values: Sequence[tuple[str, float]]

    def as_html(self) -> str:
        """Return the chart."""
        finite = [(name, value) for name, value in self.values if math.isfinite(value)]
        if not finite:
            return _figure(self.title, '<p class="ws-empty">Nothing was recorded.</p>')
        height = _BAR * len(finite)
        longest = max(abs(value) for _, value in finite) or 1.0
        row = _UNITS / len(finite)
        shapes = [
            _rect("ws-c0", 0, (place + 0.15) * row, abs(value) / longest * _UNITS, 0.7 * row)
            for place, (_, value) in enumerate(finite)
        ]
        labels = [((place + 0.5) * _BAR, f"{name} {value:.3g}") for place, (name, value) in enumerate(finite)]
        body = f'<div class="ws-grid ws-named">{_axis(labels, height)}<div class="ws-plot">{_svg(shapes, height)}</div></div>'
        return _figure(self.title, body)


@dataclass(frozen=True)
class HtmlTable:
    """A table of texts.

    Attributes:
        title: heading.
        head: names of the columns.
        rows: the rows, with as many texts each.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_html(self) -> str:
        """Return the table."""
        head = "".join(f"<th>{html_text(name)}</th>" for name in self.head)
        rows = "".join(
            f"<tr>{''.join(f'<td>{html_text(text)}</td>' for text in row)}</tr>" for row in self.rows
        )
        return _figure(self.title, f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")


@dataclass(frozen=True)
class Lane:
    """The life of one rule's alert.

    Attributes:
        name: name of the rule config.
        parts: state, first step and last step of each part.
        note: what the rule's health is, if it is not ok.
    """

    name: str
    parts: Sequence[tuple[LaneState, int, int]]
    note: str = ""


def lanes_html(title: str, lanes: Sequence[Lane], span: tuple[int, int]) -> str:
    """Return a chart with one lane for each rule."""
    height = _LANE * len(lanes)
    shapes, labels = [], []
    first, last = span
    width = max(1, last + 1 - first)
    for row, lane in enumerate(lanes):
        y = (row + 0.15) * _UNITS / max(1, len(lanes))
        tall = 0.7 * _UNITS / max(1, len(lanes))
        shapes.append(_rect("ws-lane", 0, y, _UNITS, tall))
        for state, start, end in lane.parts:
            x = (start - first) / width * _UNITS
            shapes.append(_rect(f"ws-{state}", x, y, max((end + 1 - start) / width * _UNITS, 4.0), tall))
        labels.append(((row + 0.5) * _LANE, f"{lane.name} ({lane.note})" if lane.note else lane.name))
    body = _grid(_axis(labels, height), _svg(shapes, height), span, -1, named=True)
    states = {state for lane in lanes for state, _, _ in lane.parts}
    names = {"pending": "pending", "fired": "firing", "resolved": "resolved"}
    return _figure(title, body + _legend([(f"ws-{key}", names[key]) for key in names if key in states]))


_LANE = 18


class _ValueScale:
    """The vertical axis of a line chart."""

    def __init__(self, low: float, high: float, *, is_log: bool) -> None:
        self.is_log = is_log
        self._low, self._high = (math.log10(low), math.log10(high)) if is_log else (low, high)
        margin = 0.04 * (self._high - self._low) or (abs(self._high) * 0.1 or 1.0)
        self._low, self._high = self._low - margin, self._high + margin

    @classmethod
    def of(cls, chart: LineChart) -> _ValueScale:
        points = [line.points for line in chart.lines]
        others = np.array([limit for _, limit in chart.limits] + list(chart.usual or ()), np.float64)
        measured = np.concatenate([part for line in points for part in (line.min, line.max)])
        values = np.clip(np.concatenate([measured, others]), -1e300, 1e300)
        values = values[np.isfinite(values)]
        if not len(values):
            return cls(0.0, 1.0, is_log=False)
        if is_logarithmic(measured) and (others >= 0).all():
            positive = values[values > 0]
            return cls(float(positive.min()), float(positive.max()), is_log=True)
        return cls(float(values.min()), float(values.max()), is_log=False)

    def position(self, values: Floats) -> Floats:
        """Return positions from the top, in units; NaN remains."""
        if self.is_log:
            values = np.log10(np.where(values <= 0, 10.0**self._low, values))
        share = (np.clip(values, -1e300, 1e300) - self._low) / (self._high - self._low)
        return np.clip(1.0 - share, 0.0, 1.0) * _UNITS

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and labels of about four ticks."""
        if self.is_log:
            first, last = math.ceil(self._low), math.floor(self._high)
            if last > first:
                every = max(1, math.ceil((last - first) / 4))
                values = [10.0**power for power in range(first, last + 1, every)]
            else:
                values = [10.0 ** (self._low + share * (self._high - self._low)) for share in (0.1, 0.5, 0.9)]
        else:
            values = round_ticks(self._low, self._high, 4)
        return [(float(self.position(np.array([value]))[0]), f"{value:.3g}") for value in values]


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round numbers between two numbers."""
    width = (high - low) / count
    if not width > 0 or not math.isfinite(width):
        return [low]
    power = 10.0 ** math.floor(math.log10(width))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width * 0.999)
    first = math.ceil(low / size)
    return [(first + i) * size for i in range(int(math.floor(high / size) - first) + 1)]


def _line_shapes(line: NamedSeries, colour: int, span: tuple[int, int], scale: _ValueScale) -> list[str]:
    points = line.points
    x = _x(points.step.astype(np.float64), span)
    y = scale.position(points.mean)
    connected = parts(line)
    shapes = []
    if (points.last_step > points.step).any():
        low, high = scale.position(points.min), scale.position(points.max)
        for part in connected:
            there = [f"{a:.1f},{b:.1f}" for a, b in zip(x[part], high[part], strict=True)]
            back = [f"{a:.1f},{b:.1f}" for a, b in zip(x[part][::-1], low[part][::-1], strict=True)]
            shapes.append(f'<polygon class="ws-c{colour} ws-range" points="{" ".join(there + back)}"/>')
    path = []
    for part in connected:
        xs, ys = x[part].tolist(), y[part].tolist()
        if line.is_step:
            end = float(_UNITS) if part.stop == len(y) else xs[-1]
            corners = [
                (a, b) for i, b in enumerate(ys) for a in (xs[i], xs[i + 1] if i + 1 < len(xs) else end)
            ]
        else:
            corners = list(zip(xs, ys, strict=True))
        if len(corners) == 1:
            corners = [(corners[0][0] - 2, corners[0][1]), (corners[0][0] + 2, corners[0][1])]
        path.append("M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in corners))
    shapes.append(f'<path class="ws-c{colour} ws-line" d="{"".join(path)}"/>')
    bad = x[points.nonfinite > 0]
    if len(bad):
        ticks = "".join(f"M{a:.1f} 0V60" for a in bad)
        shapes.append(f'<path class="ws-bad" d="{ticks}"/>')
    return shapes


def _x(steps: Floats, span: tuple[int, int]) -> Floats:
    first, last = span
    result: Floats = (steps - first) / max(1, last - first) * _UNITS
    return result


def _mark_shapes(marks: Sequence[PlotMark], span: tuple[int, int], offset: float = 0.0) -> list[str]:
    shapes = []
    for mark in marks:
        x = float(_x(np.array([mark.step + offset]), span)[0])
        if 0 <= x <= _UNITS:
            kind = f"ws-mark ws-{mark.kind}"
            shapes.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_UNITS}"/>')
    return shapes


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _svg(shapes: Sequence[str], height: int) -> str:
    return (
        f'<svg height="{height}" viewBox="0 0 {_UNITS} {_UNITS}" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(shapes)}</svg>"
    )


def _axis(labels: Sequence[tuple[float, str]], height: int) -> str:
    """Return the column of labels, at positions in pixels from the top. Their text ends at the right edge."""
    texts = []
    for y, text in labels:
        shown = text if len(text) <= _MAX_NAME else f"…{text[-_MAX_NAME:]}"
        place = min(max(y + 4, 9), height - 2)
        texts.append(f'<text x="100%" dx="-6" y="{place:.1f}" text-anchor="end">{html_text(shown)}</text>')
    return f'<svg class="ws-axis" height="{height}">{"".join(texts)}</svg>'


def _grid(axis: str, plot: str, span: tuple[int, int], number: int, *, named: bool = False) -> str:
    first, last = span
    anchors = (("start", 0.0), ("middle", 0.5), ("end", 1.0))
    texts = "".join(
        f'<text x="{share:.0%}" y="13" text-anchor="{anchor}">{"step " if not share else ""}'
        f"{round(first + share * (last - first))}</text>"
        for anchor, share in anchors
        if share == 0 or last > first
    )
    steps = f'<span></span><svg class="ws-steps" height="18">{texts}</svg>'
    chart = f' data-chart="{number}"' if number >= 0 else ""
    kind = "ws-grid ws-named" if named else "ws-grid"
    return f'<div class="{kind}">{axis}<div class="ws-plot"{chart}>{plot}</div>{steps}</div>'


def _figure(title: str, body: str) -> str:
    heading = f"<h3>{html_text(title)}</h3>" if title else ""
    return f'<section class="ws-chart">{heading}{body}</section>'


def mark_entries(marks: Sequence[PlotMark], span: tuple[int, int] | None) -> list[tuple[str, str]]:
    """Return the entries of the events within the steps of a chart in its legend: class and text."""
    return [
        (f"ws-mark ws-{mark.kind}", mark.text)
        for mark in marks
        if span is None or span[0] <= mark.step <= span[1]
    ]


def _legend(entries: Sequence[tuple[str, str]], extra: str = "") -> str:
    items = [
        f'<li><svg viewBox="0 0 18 8" aria-hidden="true"><rect class="{kind}" y="1" width="18" height="6"/></svg>{html_text(text)}</li>'
        for kind, text in entries
    ]
    return f'<ul class="ws-legend">{"".join(items)}{extra}</ul>'


def html_text(text: str) -> str:
    """Return text as HTML: no markup, and no characters that change the direction of writing or are not printable."""
    return escape(printable(text))


def png_url(png: bytes) -> str:
    """Return a PNG as the address of an image."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def rounded(values: Floats) -> list[float | None]:
    """Return numbers with four digits; None for NaN."""
    return [None if math.isnan(value) else float(f"{value:.4g}") for value in values.tolist()]
