"""What a report shows of a run of gradient boosting: hyperparameters, evaluations, trees, importance by name, confusion and residuals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from watchstep.format.tensors import CONFUSION, METRICS, MODES, TensorInfo
from watchstep.plots.binned import HistogramRows, NamedSeries, PlotMark
from watchstep.plots.html_chart import BarChart, HeatChart, HtmlTable, LineChart
from watchstep.reading import queries
from watchstep.reading.binning import SeriesRequest, read_lines
from watchstep.reading.columns import Columns, Selection
from watchstep.reading.index import RunIndex
from watchstep.reading.pictures import MAX_LINES, named_lines

_TREES = "tree_depth"
_IMPORTANCE = "feature_importance"
_RESIDUALS = "residuals"
_HYPERPARAMETER = "booster:"
_RATE = ":learning_rate/"

_MAX_NAMES = 500
_MAX_BARS = 20
_MAX_IMPORTANCE_LINES = 6
_MAX_CLASSES = 30
_HISTOGRAM_ROWS = 160

_KINDS = {
    "weight": "number of splits",
    "gain": "mean gain of a split",
    "cover": "mean cover of a split",
    "total_gain": "gain of all splits",
    "total_cover": "cover of all splits",
    "shap": "mean magnitude of SHAP values",
}

BoostingChart = LineChart | BarChart | HeatChart | HtmlTable


@dataclass(frozen=True)
class NamedImportance:
    """One kind of importance.

    Attributes:
        kind: the kind.
        step: step of its last record.
        values: the most important features with their values, the largest first.
        lines: the first of them over the steps.
    """

    kind: str
    step: int
    values: Sequence[tuple[str, float]]
    lines: Sequence[NamedSeries]

    @property
    def title(self) -> str:
        """A heading."""
        meaning = _KINDS.get(self.kind, self.kind)
        return f"Importance at step {self.step}: {meaning}"


@dataclass(frozen=True)
class ConfusedClass:
    """The last counts of one class.

    Attributes:
        mode: mode of the predictions.
        label: the class.
        examples: number of its examples.
        correct: how many of them were predicted as this class.
        confused_with: the most frequent wrong prediction; None without any.
        confused: how many examples were predicted as that class.
    """

    mode: str
    label: str
    examples: int
    correct: int
    confused_with: int | None
    confused: int


@dataclass(frozen=True, kw_only=True)
class BoostedRun:
    """A run of gradient boosting.

    Attributes:
        hyperparameters: names and values at the end.
        metrics: evaluations other than losses.
        depths: depths of the trees.
        gains: gain of all splits of a round.
        importances: importance by feature.
        classes: confusion of classes.
        residuals: mean and standard deviation of the residuals of a regression.
        residual_histogram: their distribution; None without any.
    """

    hyperparameters: Sequence[tuple[str, str]] = ()
    metrics: Sequence[NamedSeries] = ()
    depths: Sequence[NamedSeries] = ()
    gains: Sequence[NamedSeries] = ()
    importances: Sequence[NamedImportance] = ()
    classes: Sequence[ConfusedClass] = ()
    residuals: Sequence[NamedSeries] = ()
    residual_histogram: HistogramRows | None = field(default=None, repr=False)

    def charts(
        self, marks: Sequence[PlotMark] = (), steps: tuple[int, int] | None = None
    ) -> list[BoostingChart]:
        """Return everything that was recorded as charts.

        Args:
            marks: events.
            steps: first and last step of the axes.
        """
        charts: list[BoostingChart] = []

        def add_lines(title: str, lines: Sequence[NamedSeries]) -> None:
            if lines:
                charts.append(LineChart(title, lines, marks, steps=steps))

        add_lines("Evaluations", self.metrics)
        for importance in self.importances:
            charts.append(BarChart(importance.title, importance.values))
            add_lines("", importance.lines)
        add_lines("Depth of a round's trees", self.depths)
        add_lines("Gain of a round's splits", self.gains)
        if self.classes:
            charts.append(HtmlTable("Confusion of classes", _CONFUSION_HEAD, _confusion_rows(self.classes)))
        add_lines("Residuals: label minus prediction", self.residuals)
        if self.residual_histogram is not None:
            charts.append(HeatChart.of_histogram("Residuals by power of two", self.residual_histogram, marks))
        if self.hyperparameters:
            charts.append(HtmlTable("Hyperparameters", ("name", "value"), self.hyperparameters))
        return charts


_CONFUSION_HEAD = ("mode", "class", "examples", "predicted right", "most often taken for")


def _confusion_rows(classes: Sequence[ConfusedClass]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for entry in classes:
        other = "" if entry.confused_with is None else f"{entry.confused_with} ({entry.confused} times)"
        right = f"{entry.correct} ({entry.correct / max(1, entry.examples):.1%})"
        rows.append((entry.mode, entry.label, str(entry.examples), right, other))
    return rows


def read_boosting(index: RunIndex, points: int) -> BoostedRun | None:
    """Read what was recorded of a boosting run; None for another run.

    Args:
        index: the run's index.
        points: maximum number of points of a line.

    Raises:
        StoreError: the store cannot be read.
    """
    infos = {info.name: info for info in index.tensors()}
    if not any(info.role in {_TREES, _IMPORTANCE} for info in infos.values()):
        return None
    probes = set(index.probes())
    residuals = infos.get(_RESIDUALS)
    return BoostedRun(
        hyperparameters=_hyperparameters(index, list(infos.values())),
        metrics=_metrics(index, list(infos.values()), points),
        depths=_lines(index, _TREES, (("max", "deepest tree"), ("mean", "mean depth")), points),
        gains=_lines(index, _TREES, (("gain", "gain"),), points) if "gain" in probes else (),
        importances=_importances(index, list(infos.values()), points),
        classes=_classes(index, list(infos.values())) if "confused_with" in probes else (),
        residuals=()
        if residuals is None
        else _lines(index, _RESIDUALS, (("mean", "mean"), ("std", "standard deviation")), points),
        residual_histogram=None
        if residuals is None
        else index.consistently(lambda: queries.histogram(index, _RESIDUALS, _HISTOGRAM_ROWS, None, None)),
    )


def _lines(
    index: RunIndex, tensor: str, figures: Sequence[tuple[str, str]], points: int
) -> list[NamedSeries]:
    found: list[NamedSeries] = []
    for figure, name in figures:
        found += named_lines(read_lines(index, SeriesRequest(tensor, figure, points=points)).lines, name)
    return found[:MAX_LINES]


def _metrics(index: RunIndex, infos: Sequence[TensorInfo], points: int) -> list[NamedSeries]:
    names = sorted(
        info.name
        for info in infos
        if METRICS in info.collections
        and not info.name.startswith(_HYPERPARAMETER)
        and _RATE not in info.name
    )
    found: list[NamedSeries] = []
    for name in names[:MAX_LINES]:
        found += _lines(index, name, (("mean", name),), points)
    return found[:MAX_LINES]


def _hyperparameters(index: RunIndex, infos: Sequence[TensorInfo]) -> list[tuple[str, str]]:
    names = sorted(info.name for info in infos if info.name.startswith(_HYPERPARAMETER) or _RATE in info.name)
    last = _last_values(index, names[:_MAX_NAMES])
    return [
        (name.removeprefix(_HYPERPARAMETER).removeprefix("optimizer:"), f"{value:.6g}")
        for name, (_, value) in last.items()
    ]


def _importances(index: RunIndex, infos: Sequence[TensorInfo], points: int) -> list[NamedImportance]:
    of_kind: dict[str, list[str]] = {}
    for info in infos:
        if info.role == _IMPORTANCE and info.name.startswith(f"{_IMPORTANCE}/"):
            kind, _, feature = info.name.removeprefix(f"{_IMPORTANCE}/").partition(":")
            names = of_kind.setdefault(kind, [])
            if feature:
                names.append(info.name)
    found = []
    for kind, names in sorted(of_kind.items()):
        last = _last_values(index, sorted(names)[:_MAX_NAMES])
        if not last:
            continue
        newest = max(step for step, _ in last.values())
        current = [(name, value) for name, (step, value) in last.items() if step == newest]
        current.sort(key=lambda entry: -abs(entry[1]))
        lines: list[NamedSeries] = []
        for name, _ in current[:_MAX_IMPORTANCE_LINES]:
            lines += _lines(index, name, (("mean", _feature_of(name)),), points)
        values = [(_feature_of(name), value) for name, value in current[:_MAX_BARS]]
        found.append(NamedImportance(kind, newest, values, lines))
    return found


def _feature_of(name: str) -> str:
    return name.partition(":")[2]


def _last_values(index: RunIndex, names: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Return the step and the value of the last row of each tensor with one number."""
    if not names:
        return {}
    columns, order = _read(index, names, ("mean",))
    places = [info.name for info in index.tensors()]
    found: dict[str, tuple[int, float]] = {}
    for row in order:
        found[places[columns["tensor"][row]]] = int(columns["step"][row]), float(columns["mean"][row])
    return {name: found[name] for name in names if name in found and np.isfinite(found[name][1])}


def _classes(index: RunIndex, infos: Sequence[TensorInfo]) -> list[ConfusedClass]:
    names = [info.name for info in infos if CONFUSION in info.collections and info.role == "confusion"]
    if not names:
        return []
    figures = ("examples", "correct", "confused", "confused_with")
    columns, order = _read(index, names, figures)
    places = [info.name for info in index.tensors()]
    last: dict[tuple[int, str], int] = {}
    for row in order:
        last[int(columns["mode"][row]), places[columns["tensor"][row]]] = row
    found = []
    for (mode, name), row in sorted(last.items(), key=lambda entry: (entry[0][0], _class_order(entry[0][1]))):
        examples, correct, confused, other = (float(columns[figure][row]) for figure in figures)
        if not all(map(np.isfinite, (examples, correct, confused))):
            continue
        label = name.rpartition("/")[2]
        with_class = int(other) if np.isfinite(other) else None
        found.append(
            ConfusedClass(MODES[mode], label, int(examples), int(correct), with_class, int(confused))
        )
    return found[:_MAX_CLASSES]


def _class_order(name: str) -> tuple[int, str]:
    label = name.rpartition("/")[2]
    return (int(label) if label.isdecimal() and len(label) < 10 else 0), label


def _read(index: RunIndex, names: Sequence[str], figures: Sequence[str]) -> tuple[Columns, list[int]]:
    """Return the rows of tensors, and the order of those of the lowest worker by step."""
    selection = Selection((), frozenset(names))
    columns = index.consistently(lambda: queries.columns_of(index, figures, selection, merge=False))
    workers = columns["worker"]
    rows = np.flatnonzero(workers == workers.min()) if len(workers) else np.empty(0, np.intp)
    return columns, rows[np.argsort(columns["step"][rows], kind="stable")].tolist()
