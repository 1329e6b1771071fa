"""Pictures of runs, their scales and their cells, and charts in HTML."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from tests.sdk.reading.stored import LOSS, new_run, write
from watchstep import Run, open_run
from watchstep.client.documents import Alert
from watchstep.errors import ConfigError, NotFoundError
from watchstep.plots.binned import HeatCells, NamedSeries, PlotMark, dense, shares, without_finite
from watchstep.plots.heat import HeatScale, heat_png, scale_of
from watchstep.plots.html_chart import HeatChart, Lane, LineChart, lanes_html, round_ticks
from watchstep.plots.tensor_plot import power_label, ridge_figure, tensor_figure
from watchstep.reading.binning import SeriesRequest, bin_values
from watchstep.reading.pictures import alert_evidence, heat_cells, named_lines
from watchstep.reading.queries import HistogramSeries

# Pictures of runs


FIRST, SECOND = gradient("first", order=1), gradient("second", order=2)
RATE = tensor("optimizer:learning_rate/0", "metrics", role="metric", shape=())
STEPS = 60
FIRED = 40


def rows() -> list[Row]:
    """A loss and two gradients, of which the second explodes at step 40 and is NaN from step 50 on."""
    generator = np.random.default_rng(0)
    found = [Row(0, RATE, [0.1])]
    for step in range(STEPS):
        size = 1e4 if step >= FIRED else 1.0
        values = generator.normal(0, 1, 16)
        found.append(Row(step, LOSS, [size / (1 + step)]))
        found.append(Row(step, FIRST, values.tolist()))
        found.append(Row(step, SECOND, [np.nan] * 16 if step >= 50 else (size * values).tolist()))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("store")
    write(new_run(folder), [block_of(rows())])
    return open_run(folder / "default" / "r")


@pytest.mark.ci
def test_a_run_is_drawn(run: Run, tmp_path: Path) -> None:
    figure = run.plot()
    losses, layers, rates = figure.axes[:3]
    assert [line.get_label() for line in losses.lines][:1] == ["loss"]
    assert losses.get_yscale() == "log"
    assert [text.get_text() for text in layers.get_yticklabels()] == ["first.weight", "second.weight"]
    assert "red: NaN" in layers.get_title(loc="left")
    assert np.asarray(rates.lines[0].get_xydata()).tolist() == [[0.0, 0.1], [STEPS - 1, 0.1]]
    assert figure.save(tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in figure.save(tmp_path / "run.SVG").read_bytes()
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_tensor_is_drawn(run: Run, tmp_path: Path) -> None:
    found = run.tensor(SECOND.name)
    figure = found.plot("l2")
    (line, crosses) = figure.axes[0].lines
    steps = np.asarray(line.get_xdata())
    assert (line.get_label(), len(steps)) == ("l2", STEPS)
    assert np.asarray(crosses.get_xdata()).tolist() == list(range(50, STEPS))
    assert found.plot_ridges().save(tmp_path / "ridges.png").stat().st_size > 1000


@pytest.mark.ci
def test_a_distribution_is_animated(run: Run, tmp_path: Path) -> None:
    from PIL import Image

    animation = run.tensor(FIRST.name).animate(frames=6, frame_ms=50)
    with Image.open(animation.save(tmp_path / "first.gif")) as image:
        assert image.n_frames == 6
        assert image.info["duration"] == 50
        image.seek(5)
        assert image.info["duration"] == 1500
    html = animation._repr_html_()
    assert html.startswith("<img")
    assert "data:image/gif;base64," in html


@pytest.mark.ci
def test_a_distribution_without_finite_elements_is_drawn(tmp_path: Path) -> None:
    write(new_run(tmp_path), [block_of([Row(step, FIRST, [np.nan, 0.0]) for step in range(3)])])
    empty = open_run(tmp_path / "default" / "r")
    figure = empty.tensor(FIRST.name).plot()
    assert figure._repr_png_()
    assert ridge_figure("first", empty.histogram(FIRST.name))._repr_png_()
    assert empty.tensor(FIRST.name).animate().encode().startswith(b"GIF89a")
    assert empty.plot()._repr_png_()


def test_faults_of_arguments_are_named(run: Run, tmp_path: Path) -> None:
    figure = run.plot()
    with pytest.raises(ConfigError, match=r"ends in \.png or \.svg"):
        figure.save(tmp_path / "run.jpg")
    with pytest.raises(ConfigError, match="folder that exists"):
        figure.save(tmp_path / "none" / "run.png")
    with pytest.raises(ConfigError, match=r"ends in \.gif"):
        run.tensor(FIRST.name).animate().save("first.png")
    with pytest.raises(ConfigError, match="invalid width"):
        run.plot(width=10)
    with pytest.raises(ConfigError, match="invalid frames"):
        run.tensor(FIRST.name).animate(frames=0)
    with pytest.raises(ConfigError, match="invalid frame_ms"):
        run.tensor(FIRST.name).animate(frame_ms=1)
    with pytest.raises(ConfigError, match="no_such_figure"):
        run.tensor(FIRST.name).plot("no_such_figure")
    with pytest.raises(NotFoundError, match="no row of mode eval"):
        run.tensor(FIRST.name).plot(mode="eval")


def finding_of(run: Run, figure: str, *, step: int = FIRED, value: float | None = None) -> dict[str, object]:
    table = run.series(SECOND.name, figure)
    measured = table[figure].to_pylist()[step] if value is None else value
    return {
        "step": step, "tensor": SECOND.name, "mode": "train", "worker": 0, "role": "gradient",
        "value": measured, "threshold": 100.0, "message": "too large",
    }  # fmt: skip


@pytest.mark.parametrize("figure", ["l2", "abs_max", "std", "l1"])
def test_the_judged_figure_is_found_by_its_value(run: Run, figure: str) -> None:
    evidence = alert_evidence(run.index, "exploding", finding_of(run, figure))
    assert (evidence.figure, evidence.thresholds) == (figure, 100.0)
    assert evidence.steps == list(range(STEPS))


def test_a_quantity_of_the_rules_own_has_no_threshold(run: Run) -> None:
    evidence = alert_evidence(run.index, "ratio", finding_of(run, "l2", value=0.123))
    assert (evidence.figure, evidence.thresholds) == ("rms", None)
    missing = {**finding_of(run, "l2"), "tensor": "no such tensor"}
    assert alert_evidence(run.index, "ratio", missing).steps == ()
    with pytest.raises(ConfigError, match="no step or tensor"):
        run.plot_alert("ratio", {})


def alert(finding: dict[str, object] | None) -> Alert:
    explanation = {
        "where": "<b>second</b>",
        "against": "5, threshold 1",
        "usual_causes": ["<i>rate</i>"],
        "what_to_try": [],
    }
    details = {"message": "grows", "explanation": explanation}
    return Alert(
        "r",
        "exploding",
        "exploding_gradient",
        "a",
        "critical",
        "firing",
        40,
        0,
        0,
        None,
        finding,
        details,
        {},
    )


def test_an_alert_is_drawn_and_shown_in_a_notebook(run: Run) -> None:
    found = alert(finding_of(run, "l2"))
    figure = found.plot(run)
    assert "exploding: bad from step 40" in figure.get_suptitle()
    html = found._repr_html_()
    assert "&lt;b&gt;second&lt;/b&gt;" in html
    assert "&lt;i&gt;rate" in html
    assert "<b>" not in html
    with pytest.raises(ConfigError, match="no step or tensor"):
        alert(None).plot(run)


def test_a_run_and_a_tensor_are_shown_in_a_notebook(run: Run) -> None:
    html = run._repr_html_() + run.tensor(SECOND.name)._repr_html_()
    assert "the last step is 59" in html
    assert "second.weight:gradient" in html
    assert html.count('class="ws-c0 ws-line"') == 2
    assert "<script" not in html


# Scales and cells


def test_the_picture_has_a_pixel_for_each_cell() -> None:
    from PIL import Image

    values = np.array([[1.0, 10.0, np.nan], [100.0, 1000.0, 1.0]])
    nonfinite = np.array([[False, False, False], [False, False, True]])
    image = Image.open(io.BytesIO(heat_png(values, scale_of(values), nonfinite))).convert("RGBA")
    assert image.size == (3, 2)
    assert image.getpixel((0, 0)) == (0x44, 0x01, 0x54, 255)
    assert image.getpixel((1, 1)) == (0xFD, 0xE7, 0x25, 255)
    assert image.getpixel((2, 1)) == (0xD5, 0x5E, 0x00, 255)
    assert image.getpixel((2, 0)) == (0, 0, 0, 0)  # not measured: transparent


def test_a_scale_is_logarithmic_for_positive_values_of_many_sizes() -> None:
    assert scale_of(np.array([1.0, 2.0, np.nan])) == HeatScale(1.0, 2.0, is_log=False)
    assert scale_of(np.array([0.0, 1e-6, 1.0])) == HeatScale(1e-6, 1.0, is_log=True)
    assert scale_of(np.array([-1.0, 1e6])) == HeatScale(-1.0, 1e6, is_log=False)
    assert scale_of(np.array([np.nan])) == HeatScale(0.0, 0.0, is_log=False)


def test_some_outliers_are_outside_of_the_scale() -> None:
    values = np.concatenate([np.linspace(1.0, 2.0, 999), [1e30]])
    scale = scale_of(values, 0.005)
    assert scale.high <= 2.0
    assert scale.positions(values).max() == 1.0


def histogram_of(columns: dict[tuple[int, int], list[int]]) -> HistogramSeries:
    """Columns by sign and power, with the counts of each row."""
    ends = {key: (key[0] * 2.0 ** key[1], key[0] * 2.0 ** (key[1] + 1)) for key in columns}
    order = sorted(columns, key=lambda key: ends[key])
    counts = np.array([columns[key] for key in order], np.int64).T
    rows = len(counts)
    lower = np.array([min(ends[key]) for key in order])
    upper = np.array([max(ends[key]) for key in order])
    none = np.zeros(rows, np.int64)
    return HistogramSeries(np.arange(rows + 1), lower, upper, counts, none, none, none, none)


@given(
    st.dictionaries(
        st.tuples(st.sampled_from([-1, 1]), st.integers(-40, 40)),
        st.lists(st.integers(0, 9), min_size=3, max_size=3),
        min_size=1,
        max_size=12,
    )
)
def test_a_dense_histogram_has_all_powers_and_the_same_counts(
    columns: dict[tuple[int, int], list[int]],
) -> None:
    histogram = histogram_of(columns)
    full = dense(histogram)
    assert (np.diff(full.lower) > 0).all()
    for row in range(3):
        counts = dict(zip(full.lower.tolist(), full.counts[row].tolist(), strict=True))
        for lower, count in zip(histogram.lower.tolist(), histogram.counts[row].tolist(), strict=True):
            assert counts.pop(lower) == count
        assert not any(counts.values())
    smallest = min(power for _, power in columns)
    for side in (full.upper[full.upper < 0], full.lower[full.lower > 0]):
        if len(side):
            assert abs(side).min() == 2.0**smallest


def test_shares_and_rows_without_a_finite_element() -> None:
    histogram = HistogramSeries(
        np.arange(5),
        np.array([1.0]),
        np.array([2.0]),
        np.array([[4], [0], [0], [0]]),
        zeros=np.array([0, 0, 3, 0]),
        nonfinite=np.array([0, 0, 0, 5]),
        first=np.array([0, -1, 2, 3]),
        last=np.array([0, -1, 2, 3]),
    )
    np.testing.assert_equal(shares(histogram)[:, 0], [1.0, np.nan, 0.0, 0.0])
    assert without_finite(histogram).tolist() == [False, False, False, True]


def test_labels_of_powers() -> None:
    histogram = dense(histogram_of({(-1, 3): [1], (1, -2): [1]}))
    labels = [power_label(histogram, column) for column in range(len(histogram.lower))]
    assert labels[0] == "-2^3"
    assert labels[-1] == "2^-2"


# Charts in HTML


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


def test_steps_that_were_not_measured_are_a_gap() -> None:
    steps = np.array([0, 1, 10, 20, 21])
    line = NamedSeries("nan", bin_values(steps, np.array([0.0, 0.0, 0.0, 9.0, 9.0]), 9))
    (path,) = re.findall(r'class="ws-c0 ws-line" d="([^"]*)"', LineChart("", [line]).as_html())
    ranges = [part.split("L") for part in path.split("M")[1:]]
    assert [[round(float(point.split()[0])) for point in part] for part in ranges] == [
        [0, 48],
        [474, 478],
        [952, 1000],
    ]


def test_a_gap_is_not_filled_in_pictures_of_a_run_and_of_a_tensor(tmp_path: Path) -> None:
    rows = [Row(step, FIRST, [float(step + 1)]) for step in (*range(10), *range(30, 40))]
    write(new_run(tmp_path), [block_of(rows)])
    run = open_run(tmp_path / "default" / "r")
    cells = heat_cells(run.index, [FIRST.name], "max", 400)
    assert cells is not None
    assert np.flatnonzero(np.isnan(cells.values[0])).tolist() == list(range(10, 30))
    chart = HeatChart.of_histogram("", run.histogram(FIRST.name, 400))
    assert np.isnan(chart.values[:, 10:30]).all()
    lines = run.binned_series(SeriesRequest(FIRST.name, "max")).lines
    figure = tensor_figure(FIRST.name, "max", named_lines(lines, "max"), None)
    steps, values = figure.axes[0].lines[0].get_data()
    assert len(np.asarray(steps)) == 21
    assert np.isnan(np.asarray(values, np.float64)[10])


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
    assert 'class="ws-bad"' in HeatChart.of_tensors("l2", cells).as_html()  # not the colour of an alert
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
