from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.plots.binned import HeatCells, NamedSeries, PlotMark
from watchstep.plots.html_chart import HeatChart, Lane, LineChart, lanes_html, round_ticks
from watchstep.reading.binning import bin_values

HOSTILE = '<img src=x onerror="alert(1)">\u202e\x1b[31m</svg>'


class Tags(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def series(values: list[float], name: str = "loss") -> NamedSeries:
    return NamedSeries(name, bin_values(np.arange(len(values)), np.array(values), 100))


def test_names_are_text() -> None:
    chart = LineChart(HOSTILE, [series([1.0, 2.0], HOSTILE)], [PlotMark(1, HOSTILE)], [(HOSTILE, 1.5)])
    cells = HeatCells([HOSTILE], np.arange(3), np.ones((1, 2)), np.zeros((1, 2), np.bool_))
    heat = HeatChart.of_tensors(HOSTILE, cells)
    lanes = lanes_html(HOSTILE, [Lane(HOSTILE, [("fired", 0, 1)], HOSTILE)], (0, 1))
    for html in (chart.as_html(), heat.as_html(), lanes):
        tags = Tags(html)
        assert {tag for tag, _ in tags.found} <= {
            "section", "h3", "div", "svg", "text", "line", "rect", "path", "polygon", "span", "ul", "li", "img",
        }  # fmt: skip
        assert not any(name.startswith("on") or name == "style" for _, names in tags.found for name in names)
        assert all(names["src"].startswith("data:") for _, names in tags.found if names.get("src"))  # type: ignore[union-attr]
        assert "\u202e" not in html
        assert "\x1b" not in html
        assert "&lt;img" in html


def test_a_line_has_a_gap_where_a_value_is_not_finite() -> None:
    html = LineChart("", [series([1.0, 2.0, np.nan, 3.0, 4.0])]).as_html()
    (path,) = re.findall(r'class="ws-c0 ws-line" d="([^"]*)"', html)
    assert path.count("M") == 2
    assert 'class="ws-bad" d="M500.0 0V60"' in html
    assert "nan" not in html


def test_the_values_of_a_learning_rate_hold_until_the_next_one() -> None:
    line = NamedSeries("lr", bin_values(np.array([0, 10]), np.array([0.1, 0.2]), 9), is_step=True)
    html = LineChart("", [line], steps=(0, 20)).as_html()
    (path,) = re.findall(r'class="ws-c0 ws-line" d="M([^"]*)"', html)
    corners = [tuple(map(float, corner.split())) for corner in path.split("L")]
    assert [x for x, _ in corners] == [0.0, 500.0, 500.0, 1000.0]
    assert corners[0][1] == corners[1][1] > corners[2][1] == corners[3][1]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30))
def test_any_values_can_be_drawn(values: list[float]) -> None:
    html = LineChart("", [series(values)]).as_html()
    shapes = re.findall(r'(?:d|points|y1|x1)="([^"]*)"', html)
    numbers = [float(text) for shape in shapes for text in re.findall(r"-?[\d.]+(?:e-?\d+)?", shape)]
    assert all(-10 <= number <= 1010 for number in numbers)
    assert "inf" not in "".join(shapes)
    assert "nan" not in "".join(shapes)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3e-9, 5e-9), (1e20, 1.0001e20), (2.0, 2.0)])
def test_ticks_are_within_the_axis(low: float, high: float) -> None:
    ticks = round_ticks(low, high, 4)
    assert 1 <= len(ticks) <= 7
    assert all(low <= tick * (1 + 1e-9) and tick * (1 - 1e-9) <= high for tick in map(abs, ticks) if low >= 0)


def test_cells_are_numbers_of_the_scale() -> None:
    cells = HeatCells(
        ["a", "b"],
        np.arange(4),
        np.array([[1.0, np.nan, 3.0], [2.0, 2.0, 2.0]]),
        np.array([[False, False, False], [False, True, False]]),
    )
    data = HeatChart.of_tensors("l2", cells).data()
    codes = np.frombuffer(base64.b64decode(data["cells"]), "<u2").reshape(2, 3)
    assert codes[0].tolist() == [2, 0, 65535]
    assert codes[1].tolist() == [32768 + 2, 1, 32768 + 2] or codes[1, 1] == 1
    middle = data["low"] + (data["high"] - data["low"]) * (int(codes[1, 0]) - 2) / 65533
    assert middle == pytest.approx(2.0, abs=1e-4)


def test_nothing_recorded_is_said() -> None:
    assert "Nothing was recorded" in LineChart("loss", []).as_html()
    empty = HeatCells([], np.arange(1), np.empty((0, 0)), np.empty((0, 0), np.bool_))
    assert "Nothing was recorded" in HeatChart.of_tensors("l2", empty).as_html()
