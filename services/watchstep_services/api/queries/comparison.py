"""Comparison of runs: series on a common axis, first differences, and settings that differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError, WatchstepError
from watchstep.format.statistics import Floats
from watchstep.format.tensors import MODES, Mode, TensorInfo
from watchstep.reading.budget import OverBudgetError, ReadBudget
from watchstep.reading.columns import Columns, Selection, needs_of
from watchstep.reading.comparison import settings
from watchstep.reading.comparison.diff import RunDivergences, TensorDivergence, first_divergences
from watchstep.reading.comparison.settings import differing_settings
from watchstep.reading.queries import columns_of, loss_values
from watchstep.reading.run import Run
from watchstep_services.api.queries.answers import numbers, whole_numbers
from watchstep_services.api.queries.line_bins import LineBins, bin_rows, grid_edges
from watchstep_services.api.queries.overview import SCALAR_FIGURES, kind_of
from watchstep_services.api.schemas.binned_lines import LAST_STEP
from watchstep_services.api.schemas.comparison_page import (
    Align,
    ComparedLine,
    ComparedSeries,
    ComparedSettings,
    ComparisonGrid,
    DifferingSetting,
    Divergence,
    FirstDifference,
)

MAX_SERIES = 16
_MAX_NAMES = 1000
_MAX_DIFFERENCES = 500
_MAX_ONLY = 100
_MAX_SETTINGS = 200
_MAX_VALUE = 300
_MAX_ELAPSED_NS = 2**62
"""146 years. A recorder may write any time, and edges after the last position must be 64-bit integers."""
_TIME_SHARE = 0.6
"""Part of the remaining time of a query that the search for the first differences may take."""

Opened = Mapping[str, Run | WatchstepError]


@dataclass(frozen=True)
class ComparisonRequest:
    """What is compared.

    Attributes:
        runs: names of the runs; the first one is the reference.
        tensors: names of tensors; empty: the losses.
        figure: figure of the tensors.
        mode: only rows of this mode; None for all.
        align: step, or time since the first row of each run.
        first, last: steps.
        points: maximum number of columns.
    """

    runs: tuple[str, ...]
    tensors: tuple[str, ...]
    figure: str
    mode: Mode | None
    align: Align
    first: int
    last: int
    points: int


@dataclass(frozen=True)
class _Rows:
    """Rows of the chosen tensors of one run.

    Attributes:
        infos: descriptions that the column ``tensor`` indexes.
        columns: identity and time, n rows.
        values: the figure, shape (n,).
        started_ns: time of the first row; None without rows.
    """

    infos: Sequence[TensorInfo]
    columns: Columns
    values: Floats
    started_ns: int | None

    def positions(self, align: Align) -> NDArray[np.int64]:
        """Return the position of each row on the axis."""
        if align == "step":
            return self.columns["step"].astype(np.int64)
        return elapsed_since(self.started_ns or 0, self.columns["time_ns"])


def elapsed_since(started_ns: int, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the nanoseconds from a start to each time, at most 2^62.

    Args:
        started_ns: the earliest of the times.
        times_ns: int64 of shape (n,).
    """
    # Without a sign, because the difference of two times can be almost 2^64.
    elapsed = times_ns.astype(np.int64).view(np.uint64) - np.uint64(started_ns % 2**64)
    bounded: NDArray[np.int64] = np.minimum(elapsed, np.uint64(_MAX_ELAPSED_NS)).astype(np.int64)
    return bounded


@dataclass(frozen=True)
class AlignedSeries:
    """The series of all runs, and the start of each run."""

    grid: ComparisonGrid
    series: list[ComparedSeries]
    left_out: int
    started_ns: dict[str, int | None]


def readable(opened: Opened) -> dict[str, Run]:
    """Return the runs with statistics."""
    return {name: run for name, run in opened.items() if isinstance(run, Run)}


def common_tensors(runs: Mapping[str, Run]) -> list[str]:
    """Return the tensors that two or more runs have, in the order of the model of the first run with them."""
    counts: Counter[str] = Counter()
    infos: dict[str, TensorInfo] = {}
    for run in runs.values():
        for info in run.catalogue:
            counts[info.name] += 1
            infos.setdefault(info.name, info)
    shared = [info for name, info in infos.items() if counts[name] > 1]
    return [info.name for info in sorted(shared, key=lambda info: (info.order, info.name))][:_MAX_NAMES]


def read_compared(opened: Opened, request: ComparisonRequest) -> AlignedSeries:
    """Read the series of all runs and bin them over one grid.

    Raises:
        ConfigError: the figure does not exist.
        StoreError: a run cannot be read.
        OverBudgetError: reading exceeds the budget.
    """
    runs = {name: run for name in request.runs if isinstance(run := opened[name], Run)}
    names = list(request.tensors) or _losses(runs)
    chosen = names[:MAX_SERIES]
    rows = {name: _read(run, chosen, request) for name, run in _with_figure(runs, request.figure).items()}
    edges = _edges(rows, request)
    series: dict[tuple[str, str], ComparedSeries] = {}
    for name, of_run in rows.items():
        for line in bin_rows(of_run.columns, of_run.values, of_run.positions(request.align), edges):
            tensor = of_run.infos[line.tensor].name
            compared = series.setdefault(
                (tensor, line.mode),
                ComparedSeries(tensor=tensor, figure=request.figure, mode=line.mode, lines=[]),
            )
            compared.lines.append(_line(name, line))
    ranks = {tensor: rank for rank, tensor in enumerate(chosen)}
    modes: Sequence[str] = MODES
    ordered = sorted(series.values(), key=lambda entry: (modes.index(entry.mode), ranks[entry.tensor]))
    started = dict.fromkeys(request.runs) | {name: part.started_ns for name, part in rows.items()}
    return AlignedSeries(
        ComparisonGrid(align=request.align, edges=edges.tolist()), ordered, len(names) - len(chosen), started
    )


def _losses(runs: Mapping[str, Run]) -> list[str]:
    infos = {info.name: info for run in runs.values() for info in run.catalogue if kind_of(info) == "losses"}
    return [info.name for info in sorted(infos.values(), key=lambda info: (info.order, info.name))]


def _read(run: Run, names: Sequence[str], request: ComparisonRequest) -> _Rows:
    infos = run.index.tensors()
    first, last = (request.first, request.last) if request.align == "step" else (0, LAST_STEP)
    tensors = frozenset(names)
    if request.figure == "mean" and all(kind_of(info) for info in infos if info.name in tensors):
        selection = Selection((*SCALAR_FIGURES, "time_ns"), tensors, first, last)
        columns = run.index.consistently(lambda: run.index.collect(selection))
        values = loss_values(columns)
    else:
        selection = Selection((), tensors, first, last)
        columns = run.index.consistently(
            lambda: columns_of(run.index, [request.figure, "time_ns"], selection, merge=True)
        )
        values = columns[request.figure].astype(np.float64)
    if request.mode is not None:
        rows = columns["mode"] == MODES.index(request.mode)
        columns, values = {name: column[rows] for name, column in columns.items()}, values[rows]
    times = columns["time_ns"]
    return _Rows(infos, columns, values, int(times.min()) if len(times) else None)


def _with_figure(runs: Mapping[str, Run], figure: str) -> dict[str, Run]:
    """Return the runs that can answer a figure: a probe may be recorded in some of them.

    Raises:
        ConfigError: none can.
    """
    found: dict[str, Run] = {}
    problem: ConfigError | None = None
    for name, run in runs.items():
        try:
            needs_of(figure, run.index.probes())
        except ConfigError as error:
            problem = error
        else:
            found[name] = run
    if problem is not None and not found:
        raise problem
    return found


def _edges(rows: Mapping[str, _Rows], request: ComparisonRequest) -> NDArray[np.int64]:
    lows, highs = [], []
    for part in rows.values():
        positions = part.positions(request.align)
        if len(positions):
            lows.append(int(positions.min()))
            highs.append(int(positions.max()))
    return grid_edges(min(lows), max(highs), request.points) if lows else np.empty(0, np.int64)


def _line(run: str, line: LineBins) -> ComparedLine:
    return ComparedLine(
        run=run,
        workers=line.workers,
        count=whole_numbers(line.count),
        mean=numbers(line.mean),
        min=numbers(line.min),
        max=numbers(line.max),
        nonfinite=whole_numbers(line.nonfinite),
    )


def divergences_of(opened: Opened, request: ComparisonRequest, budget: ReadBudget) -> list[Divergence]:
    """Find where each run first differs from the first one, within a part of the remaining time.

    Raises:
        StoreError: a run cannot be read.
    """
    reference, *others = request.runs
    run_a = opened[reference]
    divergences = []
    for place, other in enumerate(others):
        run_b = opened[other]
        if isinstance(run_a, Run) and isinstance(run_b, Run):
            seconds = budget.remaining_seconds * _TIME_SHARE / (len(others) - place)
            divergences.append(_divergence((reference, run_a), (other, run_b), request, seconds))
    return divergences


def _divergence(
    a: tuple[str, Run], b: tuple[str, Run], request: ComparisonRequest, seconds: float
) -> Divergence:
    steps = (request.first, request.last) if request.align == "step" else (0, LAST_STEP)
    notes: tuple[str, ...] = ()
    try:
        found = first_divergences(a[1], b[1], steps=steps, seconds=seconds)
    except OverBudgetError as error:
        found = RunDivergences([], steps[0], -1, 0, 0, [], [], ())
        notes = (f"not compared: {error.what}",)
    is_searched = found.left_out == 0 and not notes
    end = min(steps[1], a[1].index.step_range()[1], b[1].index.step_range()[1])
    return Divergence(
        reference=a[0],
        run=b[0],
        first=_difference(found.tensors[0]) if found.tensors else None,
        tensors=[_difference(entry) for entry in found.tensors[:_MAX_DIFFERENCES]],
        compared_first=found.first,
        compared_last=found.last,
        tensors_left_out=found.left_out,
        complete=is_searched and (found.last >= end or end < found.first),
        rows=found.rows,
        only_reference=found.only_a[:_MAX_ONLY],
        only_run=found.only_b[:_MAX_ONLY],
        notes=[*found.notes, *notes],
    )


def _difference(entry: TensorDivergence) -> FirstDifference:
    return FirstDifference(
        step=entry.step,
        mode=entry.mode,
        tensor=entry.tensor,
        worker=entry.worker,
        figure=entry.figure,
        a=_finite(entry.a),
        b=_finite(entry.b),
        relative=_finite(entry.relative),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def settings_of(opened: Opened, request: ComparisonRequest) -> ComparedSettings:
    """Compare the settings of all runs with statistics.

    Raises:
        StoreError: a run cannot be read.
        OverBudgetError: reading exceeds the budget.
    """
    runs = {name: run for name in request.runs if isinstance(run := opened[name], Run)}
    if not runs:
        return ComparedSettings(differing=[], compared={})
    found = differing_settings(list(runs.values()), (request.first, request.last))
    return ComparedSettings(
        differing=[_setting(entry, list(runs), request.runs) for entry in found.differing[:_MAX_SETTINGS]],
        compared=dict(found.compared),
    )


def _setting(
    entry: settings.SettingDifference, runs: list[str], requested: Sequence[str]
) -> DifferingSetting:
    values = dict(zip(runs, entry.values, strict=True))
    shown = [values.get(name) for name in requested]
    return DifferingSetting(
        source=entry.source,
        name=entry.name[:_MAX_VALUE],
        values=[value[:_MAX_VALUE] if isinstance(value, str) else value for value in shown],
        step=entry.step,
    )
