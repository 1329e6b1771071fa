"""The data of pictures, read from a run's index with the same bins as the service's API: losses, learning rates, heatmaps, alerts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from watchstep.errors import ConfigError
from watchstep.format.tensors import GRADIENTS, METRICS, MODES, TensorInfo
from watchstep.plots.alert_evidence import AlertEvidence
from watchstep.plots.binned import HeatCells, NamedSeries, PlotMark, RunPicture
from watchstep.reading import queries
from watchstep.reading.binning import Line, SeriesRequest, bin_values, read_lines
from watchstep.reading.columns import Columns, Selection
from watchstep.reading.grid import GridRequest, read_grid
from watchstep.reading.index import RunIndex

MAX_ROWS = 200
"""Maximum number of tensors of a heatmap, as in the API."""

MAX_LINES = 12
MAX_FRAMES = 240
MIN_WIDTH, MAX_WIDTH = 200, 4000
_RATE = ":learning_rate/"
_WINDOW = 60
"""Steps before and after an alert that its picture shows."""

VALUE = "value"
"""What the picture of an alert calls the mean of a single number."""

_FIGURES = (
    "rms",
    "l2",
    "abs_max",
    "mean",
    "abs_mean",
    "std",
    "zero_share",
    "nonfinite_share",
    "max",
    "min",
    "abs_min",
)
"""Figures in the order in which they are compared with the value of a finding: several may be equal, for instance all are zero."""

_COUNTS = ("nan", "pos_inf", "neg_inf", "zero", "negative", "l1", "variance", "sum")


def loss_lines(index: RunIndex, points: int) -> list[NamedSeries]:
    """Return the losses over the steps, one line for each name and mode, of the lowest worker; of at most `MAX_LINES`."""
    import pyarrow as pa

    table = queries.losses_of(index)
    steps, values, workers = (table[name].to_numpy() for name in ("step", "value", "worker"))
    names, modes = (
        column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        for column in (table["name"].combine_chunks(), table["mode"].combine_chunks())
    )
    name_codes, mode_codes = (part.indices.to_numpy().astype(np.int64) for part in (names, modes))
    keys = name_codes * len(MODES) + mode_codes
    lines = []
    _, firsts = np.unique(keys, return_index=True)
    for first in np.sort(firsts)[:MAX_LINES].tolist():
        chosen = np.flatnonzero(keys == keys[first])
        chosen = chosen[workers[chosen] == workers[chosen].min()]
        chosen = chosen[np.argsort(steps[chosen], kind="stable")]
        name, mode = names[first].as_py(), modes[first].as_py()
        notes = [mode] * (mode != "train") + [f"worker {workers.min()}"] * bool(
            workers.min() != workers.max()
        )
        label = f"{name} ({', '.join(notes)})" if notes else name
        lines.append(NamedSeries(label, bin_values(steps[chosen], values[chosen], points)))
    return lines


def rate_lines(index: RunIndex, points: int) -> list[NamedSeries]:
    """Return the learning rates of the optimizers' parameter groups, of at most `MAX_LINES`. A rate is valid until its next row."""
    infos = [info for info in index.tensors() if METRICS in info.collections and _RATE in info.name]
    lines = []
    for info in sorted(infos, key=lambda info: info.name)[:MAX_LINES]:
        found = read_lines(index, SeriesRequest(info.name, "mean", points=points)).lines
        lines += [NamedSeries(info.name, line, is_step=True) for line in found[:1]]
    return lines


def named_lines(lines: Sequence[Line], name: str) -> list[NamedSeries]:
    """Return lines with names that say how they differ."""
    modes = {line.mode for line in lines}
    workers = {line.worker for line in lines}
    others = {(line.replica, line.stage) for line in lines}

    def text(line: Line) -> str:
        parts = [line.mode] if len(modes) > 1 else []
        parts += [f"worker {line.worker}"] if len(workers) > 1 else []
        parts += [f"replica {line.replica}, {line.stage}"] if len(others) > 1 else []
        return f"{name} ({', '.join(parts)})" if parts else name

    return [NamedSeries(text(line), line) for line in lines]


def heatmap_names(index: RunIndex, collection: str) -> list[str]:
    """Return the names of a collection's tensors in the model's order, at most `MAX_ROWS`."""
    infos = sorted((info for info in index.tensors() if collection in info.collections), key=_model_order)
    return [info.name for info in infos[:MAX_ROWS]]


def _model_order(info: TensorInfo) -> tuple[int, str]:
    return info.order, info.name


def heat_cells(index: RunIndex, names: list[str], statistic: str, columns: int) -> HeatCells | None:
    """Return a figure of tensors over the steps of mode train: the largest value of each cell.

    Args:
        index: the run's index.
        names: the tensors; None is returned without any.
        statistic: the figure.
        columns: maximum number of columns.
    """
    if not names:
        return None
    grid = read_grid(index, GridRequest(tuple(names), statistic, columns, nonfinite=True))
    return HeatCells(names, grid.edges, grid.max, grid.nonfinite > 0)


def run_picture(
    index: RunIndex,
    heading: tuple[str, Sequence[PlotMark]],
    statistic: str = "l2",
    collection: str = GRADIENTS,
    width: int = 1000,
) -> RunPicture:
    """Read the data of the picture of a run.

    Args:
        index: the run's index.
        heading: title and events.
        statistic: the figure of the heatmap.
        collection: the collection of the heatmap.
        width: width in pixels, which limits the number of points.

    Raises:
        ConfigError: the figure does not exist, or the width is invalid.
        StoreError: the store cannot be read.
    """
    checked_width(width)
    names = heatmap_names(index, collection)
    title, marks = heading
    return RunPicture(
        title=title,
        losses=loss_lines(index, width),
        statistic=f"{statistic} of {collection}",
        heatmap=heat_cells(index, names, statistic, width // 4),
        rates=rate_lines(index, width),
        marks=marks,
    )


def checked_width(width: int) -> int:
    """Return the width of a picture in pixels.

    Raises:
        ConfigError: it is invalid.
    """
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ConfigError(f"invalid width={width!r}", f"use {MIN_WIDTH} to {MAX_WIDTH} pixels")
    return width


def alert_evidence(
    index: RunIndex,
    rule: str,
    finding: Mapping[str, Any],
    *,
    run: str = "",
    stopped_at: int | None = None,
    usual_range: tuple[float, float] | None = None,
) -> AlertEvidence:
    """Read the series that an alert is about, around its step.

    A finding does not name the figure that it judged. The figure is the one whose value at the finding's step equals the finding's value.
    If there is none, because the rule computes its own quantity, the picture has the tensor's rms, or the mean of a single number, and no
    threshold: it would be of another quantity.

    Args:
        index: the run's index.
        rule: name of the rule config.
        finding: the finding, as data (`watchstep_rules.rule.Finding`).
        run: the run's name.
        stopped_at: last step of a stopped run.
        usual_range: usual range of the tensor's rms; used for that figure only.

    Raises:
        ConfigError: the finding has no step.
        StoreError: the store cannot be read.
    """
    step, tensor = finding.get("step"), finding.get("tensor")
    if type(step) is not int or not isinstance(tensor, str):
        raise ConfigError(
            f"alert of {rule}: its finding has no step or tensor", "use the finding of an alert"
        )
    columns, figure, matches = _judged_figure(index, tensor, finding)
    threshold = _number(finding.get("threshold")) if matches else None
    return AlertEvidence(
        rule=rule,
        tensor=tensor,
        figure=VALUE if figure == fallback_figure(finding) == "mean" else figure,
        steps=[int(number) for number in columns["step"]] if columns else (),
        values=[float(value) for value in columns[figure]] if columns else (),
        step=step,
        thresholds=threshold if threshold is not None and math.isfinite(threshold) else None,
        usual_range=usual_range if figure == "rms" else None,
        stopped_at=stopped_at,
        message=str(finding.get("message", "")),
        run=run,
    )


def fallback_figure(finding: Mapping[str, Any]) -> str:
    """Return the figure of a tensor that is shown if the judged one is unknown; that of a single number is its value."""
    return "mean" if finding.get("role") in {"loss", "metric"} else "rms"


def _judged_figure(index: RunIndex, tensor: str, finding: Mapping[str, Any]) -> tuple[Columns, str, bool]:
    """Return the rows around the finding with the judged figure, its name, and whether its value is the finding's."""
    fallback = fallback_figure(finding)
    if all(info.name != tensor for info in index.tensors()):
        return {}, fallback, False
    step = int(finding["step"])
    figures = [*_FIGURES, *_COUNTS, *index.probes()]
    selection = Selection((), frozenset([tensor]), max(0, step - _WINDOW), step + _WINDOW)
    columns = index.consistently(lambda: queries.columns_of(index, figures, selection, merge=True))
    rows = np.flatnonzero(
        (columns["mode"] == _mode(finding)) & (columns["worker"] == _worker(finding, columns))
    )
    rows = rows[np.argsort(columns["step"][rows], kind="stable")]
    columns = {name: column[rows] for name, column in columns.items()}
    value = _number(finding.get("value"))
    at_step = np.flatnonzero(columns["step"] == step)
    if value is not None and len(at_step):
        for figure in (fallback, *figures):
            if _is_equal(float(columns[figure][at_step[0]]), value):
                return columns, figure, True
    return columns, fallback, False


def _mode(finding: Mapping[str, Any]) -> int:
    mode = finding.get("mode")
    return MODES.index(mode) if mode in MODES else 0


def _worker(finding: Mapping[str, Any], columns: Columns) -> int:
    workers = set(np.unique(columns["worker"]).tolist())
    worker = finding.get("worker")
    return worker if type(worker) is int and worker in workers else min(workers, default=0)


def _is_equal(measured: float, judged: float) -> bool:
    if not math.isfinite(measured) or not math.isfinite(judged):
        return False
    return measured == judged or (judged != 0 and math.isclose(measured, judged, rel_tol=1e-5))


def _number(value: Any) -> float | None:
    """Return a number; a finding in JSON has ``"NaN"`` and ``"Infinity"`` as text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
