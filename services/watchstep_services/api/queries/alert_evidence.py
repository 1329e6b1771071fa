"""The evidence of an alert from the statistics: its series, what deviates, and what changed before.

The figure of the series is the one that has the finding's value at its step. Rules that compare derived values, such as a ratio of two
norms, have none; then the usual figure of the tensor's role is shown, and the thresholds belong to another axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Floats
from watchstep.format.tensors import MODES, TensorInfo
from watchstep.platform.terminal_text import number_text
from watchstep.reading.binning import bin_values
from watchstep.reading.columns import Columns, Selection
from watchstep.reading.queries import columns_of, loss_values
from watchstep.reading.run import Run
from watchstep_rules.signals.deviations import read_deviations
from watchstep_services.api.queries.answers import numbers, whole_numbers
from watchstep_services.api.queries.overview import REPEATED_STEPS, SCALAR_FIGURES, kind_of
from watchstep_services.api.schemas.alert_page import (
    AlertDeviations,
    AlertFinding,
    EvidenceLine,
    PriorEvent,
    ThresholdPoint,
)

_FIGURES = (
    "l2", "rms", "mean", "abs_max", "abs_mean", "std", "min", "max", "abs_min", "zero_share",
    "nonfinite_share", "nan", "pos_inf", "neg_inf", "zero", "l1", "variance",
)  # fmt: skip
"""Figures in the order in which they are compared with the finding's value."""

_OF_NUMBER = ("mean", "nonfinite_share")
"""Figures of a tensor of one element: all others follow from its value."""

_USUAL = {"gradient": "l2", "loss": "mean", "metric": "mean"}
_MAX_LOSSES = 4
_MAX_CHANGES = 5
_LARGE_CHANGE = 0.1
"""Relative change of a hyperparameter from which it is listed by itself; a schedule changes it a little at each step."""


@dataclass(frozen=True)
class AlertWindow:
    """The steps around an alert.

    Attributes:
        first, last: the steps that the pictures show.
        since: first step of the findings that made it fire.
        points: maximum number of points of a line.
    """

    first: int
    last: int
    since: int
    points: int


def read_evidence_lines(run: Run, finding: AlertFinding, window: AlertWindow) -> list[EvidenceLine]:
    """Read the line that a finding is about, and the training losses.

    Raises:
        StoreError: the store cannot be read.
        OverBudgetError: reading exceeds the run's budget.
    """
    infos = run.index.tensors()
    lines = []
    if any(info.name == finding.tensor for info in infos):
        lines = list(_tensor_lines(run, finding, window))
    shown = {(line.tensor, line.figure) for line in lines}
    lines += [
        line
        for line in _loss_lines(run, infos, finding.worker, window)
        if (line.tensor, line.figure) not in shown
    ]
    return lines


def _tensor_lines(run: Run, finding: AlertFinding, window: AlertWindow) -> Iterator[EvidenceLine]:
    figures = (*_FIGURES, *run.index.probes())
    selection = Selection(("time_ns",), frozenset([finding.tensor]), window.first, window.last)
    needed = (*figures, "count", "time_ns")
    columns = run.index.consistently(lambda: columns_of(run.index, needed, selection, merge=True))
    rows = _rows_of(columns, finding)
    if not len(rows):
        return
    is_number = bool((columns["count"][rows] == 1).all())
    measured = _measured(columns, rows, finding, _OF_NUMBER if is_number else figures)
    usual = "mean" if is_number else _USUAL.get(finding.role, "rms")
    for figure in dict.fromkeys((measured or usual, usual)):
        yield _line(columns, rows, columns[figure].astype(np.float64), window.points).model_copy(
            update={
                "tensor": finding.tensor,
                "figure": figure,
                "worker": int(columns["worker"][rows[0]]),
                "measures_value": figure == measured,
            }
        )


def _rows_of(columns: Columns, finding: AlertFinding) -> NDArray[np.intp]:
    """Return the rows of the series of a finding, by step; those of the lowest worker if its worker has none."""
    rows = np.flatnonzero(columns["mode"] == MODES.index(finding.mode)) if finding.mode in MODES else _NONE
    if not len(rows):
        return rows
    keys = ("worker", "replica", "stage")
    rows = rows[np.lexsort([columns[name][rows] for name in (*reversed(keys), "step")])]
    own = rows[columns["worker"][rows] == finding.worker]
    first = min(own if len(own) else rows, key=lambda row: tuple(int(columns[name][row]) for name in keys))
    chosen = np.ones(len(rows), np.bool_)
    for name in keys:
        chosen &= columns[name][rows] == columns[name][first]
    return rows[chosen]


_NONE = np.empty(0, np.intp)


def _measured(columns: Columns, rows: NDArray[np.intp], finding: AlertFinding, figures: Sequence[str]) -> str:
    """Return the figure that has the finding's value at its step; empty for none."""
    at_step = rows[columns["step"][rows] == finding.step]
    if finding.value is None or not finding.value or not len(at_step):
        return ""
    for figure in figures:
        if math.isclose(float(columns[figure][at_step[0]]), finding.value, rel_tol=1e-6):
            return figure
    return ""


def _loss_lines(
    run: Run, infos: Sequence[TensorInfo], of_worker: int, window: AlertWindow
) -> Iterator[EvidenceLine]:
    """Lines of the losses, of the finding's worker, or of the lowest one if that has none."""
    losses = sorted(
        (info for info in infos if kind_of(info) == "losses"), key=lambda info: (info.order, info.name)
    )[:_MAX_LOSSES]
    if not losses:
        return
    names = frozenset(info.name for info in losses)
    selection = Selection((*SCALAR_FIGURES, "time_ns"), names, window.first, window.last)
    columns = run.index.consistently(lambda: run.index.collect(selection))
    values = loss_values(columns)
    for info in losses:
        place = infos.index(info)
        for mode in sorted(set(columns["mode"][columns["tensor"] == place].tolist())):
            rows = np.flatnonzero((columns["tensor"] == place) & (columns["mode"] == mode))
            workers = columns["worker"][rows]
            worker = of_worker if (workers == of_worker).any() else int(workers.min())
            rows = rows[workers == worker]
            rows = rows[np.argsort(columns["step"][rows], kind="stable")]
            yield _line(columns, rows, values, window.points).model_copy(
                update={"tensor": info.name, "figure": "mean", "worker": worker}
            )


def _line(columns: Columns, rows: NDArray[np.intp], values: Floats, points: int) -> EvidenceLine:
    """Return a line of rows, which are ordered by step; its names are set by the caller."""
    steps = columns["step"][rows].astype(np.int64)
    bins = bin_values(steps, values[rows], points)
    times = columns["time_ns"][rows].astype(np.int64)
    first_rows = np.searchsorted(steps, bins.step)
    return EvidenceLine(
        tensor="",
        figure="",
        mode=MODES[columns["mode"][rows[0]]],
        worker=0,
        measures_value=False,
        step=whole_numbers(bins.step),
        last_step=whole_numbers(bins.last_step),
        time_ns=whole_numbers(times[first_rows]),
        mean=numbers(bins.mean),
        min=numbers(bins.min),
        max=numbers(bins.max),
        nonfinite=whole_numbers(bins.nonfinite),
    )


def deviations_at(run: Run, attempt: str, step: int) -> AlertDeviations:
    """Rank the tensors that deviate at a step; see `watchstep_rules.signals.deviations`.

    Raises:
        StoreError: the store cannot be read.
        OverBudgetError: reading exceeds the run's budget.
    """
    result = read_deviations(run, attempt, step)
    return AlertDeviations(
        deviations=result.deviations,
        tensors_left_out=result.tensors_left_out,
        superseded=result.superseded,
        problem="",
    )


def hyperparameter_changes(run: Run, first: int, last: int) -> list[PriorEvent]:
    """Return changes of hyperparameters between two steps, newest first: large ones one by one, others as one entry.

    Raises:
        StoreError: the store cannot be read.
        OverBudgetError: reading exceeds the run's budget.
    """
    infos = run.index.tensors()
    names = frozenset(info.name for info in infos if kind_of(info) == "optimizer")
    if not names:
        return []
    selection = Selection((*SCALAR_FIGURES, "time_ns"), names, max(0, first - REPEATED_STEPS), last)
    columns = run.index.consistently(lambda: run.index.collect(selection))
    values = loss_values(columns)
    entries: list[PriorEvent] = []
    for place in np.unique(columns["tensor"]).tolist():
        rows = np.flatnonzero(columns["tensor"] == place)
        rows = rows[columns["worker"][rows] == columns["worker"][rows].min()]
        rows = rows[np.argsort(columns["step"][rows], kind="stable")]
        entries += _changes(infos[place].name, columns, rows, values, first)
    return sorted(entries, key=lambda entry: (-(entry.step or 0), entry.title))


def _changes(
    name: str, columns: Columns, rows: NDArray[np.intp], values: Floats, first: int
) -> Iterator[PriorEvent]:
    value, step = values[rows], columns["step"][rows].astype(np.int64)
    changed = np.flatnonzero((value[1:] != value[:-1]) & (step[1:] >= first)) + 1
    if not len(changed):
        return
    with np.errstate(all="ignore"):
        size = np.abs(value[changed] - value[changed - 1]) / np.abs(value[changed - 1])
    large = changed[~(size < _LARGE_CHANGE)][-_MAX_CHANGES:]
    for row in large.tolist():
        yield _change(
            name, float(value[row - 1]), float(value[row]), int(step[row]), _time(columns, rows, row)
        )
    if len(changed) > len(large):
        before, after = float(value[changed[0] - 1]), float(value[changed[-1]])
        entry = _change(name, before, after, int(step[changed[-1]]), _time(columns, rows, int(changed[-1])))
        yield entry.model_copy(update={"title": f"{entry.title} in {len(changed)} changes"})


def _time(columns: Columns, rows: NDArray[np.intp], row: int) -> int:
    return int(columns["time_ns"][rows[row]])


def _change(name: str, before: float, after: float, step: int, at_ns: int) -> PriorEvent:
    verb = "rose" if after > before else "fell" if after < before else "changed"
    return PriorEvent(
        kind="hyperparameter",
        step=step,
        at_ns=at_ns,
        title=f"{name} {verb} from {before:.6g} to {after:.6g}",
        before=before if math.isfinite(before) else None,
        after=after if math.isfinite(after) else None,
    )


def finding_of(data: Mapping[str, Any]) -> AlertFinding:
    """Return a stored finding. Numbers that are not finite are stored as text."""
    value, threshold = _number(data.get("value")), _number(data.get("threshold"))
    return AlertFinding(
        step=int(data.get("step", 0)),
        mode=str(data.get("mode", "")),
        worker=int(data.get("worker", 0)),
        tensor=str(data.get("tensor", "")),
        module=str(data.get("module", "")),
        module_type=str(data.get("module_type", "")),
        role=str(data.get("role", "")),
        value=_finite(value),
        value_text=number_text(value),
        threshold=_finite(threshold),
        threshold_text=number_text(threshold),
        message=str(data.get("message", "")),
        time_ns=int(data.get("time_ns", 0)),
        upstream=[str(name) for name in data.get("upstream") or ()],
        origin=str(data.get("origin", "")),
    )


def threshold_point(step: int, data: Mapping[str, Any]) -> ThresholdPoint:
    """Return the value and the threshold of a stored finding."""
    return ThresholdPoint(
        step=step,
        tensor=str(data.get("tensor", "")),
        worker=int(data.get("worker", 0)),
        value=_finite(_number(data.get("value"))),
        threshold=_finite(_number(data.get("threshold"))),
    )


def fixed_threshold(
    finding: AlertFinding, findings: Sequence[ThresholdPoint], parameters: Mapping[str, Any]
) -> tuple[float | None, str]:
    """Return the threshold and the parameter that it is, if all findings have the same one; else None and an empty name."""
    if finding.threshold is None or any(point.threshold != finding.threshold for point in findings):
        return None, ""
    equal = [
        name
        for name, value in parameters.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and float(value) == finding.threshold
    ]
    return (finding.threshold, equal[0]) if len(equal) == 1 else (None, "")


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # a number, or "NaN" or "Infinity"
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
