"""Grids: one figure of many tensors over the steps, in columns of steps. Heatmaps are drawn from them.

Objects are read one by one, and each adds its rows to the cells of its tensors. Rows of a compacted object are ordered by tensor and step,
so the rows of a cell follow each other and are reduced together; rows in another order are sorted first.

A value belongs to the steps at which it was measured, so a cell without a measurement is empty. Columns are as wide as the usual distance
between two measurements of a tensor: tensors that are measured at every tenth step have columns of ten steps, and an empty cell is a gap. Where
it is possible with columns that are a little wider, one begins at the first step with NaN or infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError
from watchstep.format.statistics import Floats
from watchstep.format.tensors import Mode, mode_index
from watchstep.reading.columns import Columns, Selection, figure_of, needs_of
from watchstep.reading.index import RunIndex
from watchstep.reading.queries import REDUCTIONS, Heatmap, Reduce, columns_of, edges_between, usual_distance

_NONFINITE = ("nan", "pos_inf", "neg_inf")
_CELL_BYTES = 40
_MAX_STEPS_OF_TABLE = 1 << 24
"""A table of the columns of all steps would be larger than the rows of a longer run."""


@dataclass(frozen=True)
class GridRequest:
    """Parameters of a grid.

    Attributes:
        tensors: names, one for each row; m of them, each once.
        figure: as for `Run.series`.
        columns: maximum number of columns. There are fewer if the tensors are measured less often.
        mode: only rows of this mode; None for all.
        first: first step.
        last: last step.
        reductions: which of mean, min and max to compute.
        nonfinite: whether to count elements that are not finite, which takes three more columns of the store.
        worker: only rows of this worker, also of its shard of a tensor alone; None for all workers, whose shards are merged.
    """

    tensors: tuple[str, ...]
    figure: str
    columns: int = 200
    mode: Mode | None = "train"
    first: int = 0
    last: int = 2**62
    reductions: tuple[Reduce, ...] = REDUCTIONS
    nonfinite: bool = False
    worker: int | None = None


@dataclass(frozen=True)
class Grid:
    """One figure of m tensors in n columns of steps.

    Attributes:
        tensors: names, one for each row.
        edges: int64 of shape (n + 1,); column i covers the steps edges[i] … edges[i + 1] - 1.
        count: int64 of shape (m, n); rows with a finite value.
        mean: float64 of shape (m, n); NaN if a cell has no finite value, or if it was not requested.
        min: as ``mean``.
        max: as ``mean``.
        nonfinite: int64 of shape (m, n); NaN and infinite elements of the tensors, zero if they were not requested.
    """

    tensors: tuple[str, ...]
    edges: NDArray[np.int64]
    count: NDArray[np.int64]
    mean: Floats
    min: Floats
    max: Floats
    nonfinite: NDArray[np.int64]


def read_grid(index: RunIndex, request: GridRequest) -> Grid:
    """Read a grid.

    Raises:
        ConfigError: the figure or the mode does not exist, or the number of columns is invalid.
        StoreError: the store cannot be read.
        OverBudgetError: the index's budget is exceeded.
    """
    if request.columns < 1:
        raise ConfigError(f"invalid number of columns {request.columns}", "use 1 or more")
    if request.mode is not None:
        mode_index(request.mode)  # raises if it is unknown
    return index.consistently(lambda: _read(index, request))


def read_heatmap(index: RunIndex, names: list[str], request: GridRequest) -> Heatmap:
    """See `Run.heatmap`; the request has each of the names once, and one reduction."""
    if request.columns < 1:
        raise ConfigError(f"invalid number of bins {request.columns}", "use 1 or more")
    (reduce,) = request.reductions
    if reduce not in REDUCTIONS:
        raise ConfigError(f"unknown reduce {reduce!r}", f"use {', '.join(REDUCTIONS)}")
    grid = read_grid(index, request)
    rows = {name: row for row, name in enumerate(request.tensors)}
    values: Floats = getattr(grid, reduce)
    return Heatmap(names, grid.edges, values[[rows[name] for name in names]])


def _read(index: RunIndex, request: GridRequest) -> Grid:
    first, last = index.step_range()
    edges = edges_between(max(first, request.first), min(last, request.last), request.columns)
    cells = _Cells(index, request, edges)
    figures = (request.figure, *(_NONFINITE if request.nonfinite else ()))
    probes = index.probes()
    needs = tuple(dict.fromkeys(name for figure in figures for name in needs_of(figure, probes)))
    selection = Selection(needs, frozenset(request.tensors), int(edges[0]), int(edges[-1]) - 1)
    for columns in index.scan(selection):
        if request.worker is None and (columns["shard_count"] > 1).any():
            cells = _Cells(index, request, edges)
            cells.add(columns_of(index, figures, selection, merge=True))
            break
        cells.add(columns)
    return cells.grid()


def _aligned(most: int, width: int, place: int) -> int:
    """Return a number of columns, of equal width, of which one begins at a place, so that nothing before it looks as what begins there.

    Args:
        most: the number without this wish.
        width: width of all columns together.
        place: the place.

    Returns:
        The largest such number from half of ``most`` on; ``most`` if there is none.
    """
    for columns in range(most, max(1, most // 2) - 1, -1):
        if -(-(place * columns // width) * width // columns) == place:
            return columns
    return most


class _Cells:
    """The cells of a grid, accumulated object by object."""

    def __init__(self, index: RunIndex, request: GridRequest, edges: NDArray[np.int64]) -> None:
        self._request, self._edges = request, edges
        self._shape = len(request.tensors), len(edges) - 1
        size = self._shape[0] * self._shape[1]
        if index.budget is not None:
            index.budget.keep(_CELL_BYTES * size)
        rows_by_name = {name: row for row, name in enumerate(request.tensors)}
        rows = np.array([rows_by_name.get(info.name, -1) for info in index.tensors()] or [-1], np.int64)
        self._start = rows * self._shape[1]
        self._columns = None if edges[-1] - edges[0] > _MAX_STEPS_OF_TABLE else self._table()
        self._count = np.zeros(size, np.int64)
        self._total = np.zeros(size)
        self._low, self._high = np.full(size, np.inf), np.full(size, -np.inf)
        self._nonfinite = np.zeros(size, np.int64)

    def _table(self) -> NDArray[np.int64]:
        """Return the column of each step."""
        return np.repeat(np.arange(self._shape[1]), np.diff(self._edges))

    def add(self, columns: Columns) -> None:
        """Add rows."""
        request = self._request
        if request.worker is not None:
            of_worker = columns["worker"] == request.worker
            columns = {name: values[of_worker] for name, values in columns.items()}
        cell = self._column_of(columns["step"]) + self._start[columns["tensor"]]
        of_mode: NDArray[np.bool_] | None = None
        if request.mode is not None and not (columns["mode"] == mode_index(request.mode)).all():
            of_mode = columns["mode"] == mode_index(request.mode)
        if request.nonfinite:
            bad = columns["nan"] + columns["pos_inf"] + columns["neg_inf"]
            rows = np.flatnonzero(bad if of_mode is None else of_mode & (bad > 0))
            np.add.at(self._nonfinite, cell[rows], bad[rows].astype(np.int64))
        values = figure_of(columns, request.figure)
        chosen = np.isfinite(values)
        if of_mode is not None:
            chosen &= of_mode
        if not chosen.all():
            values, cell = values[chosen], cell[chosen]
        if len(values):
            self._reduce(cell, values)

    def _reduce(self, cell: NDArray[np.int64], values: Floats) -> None:
        steps = np.diff(cell)
        if len(steps) and int(steps.min()) < 0:
            order = np.argsort(cell, kind="stable")
            cell, values = cell[order], values[order]
            steps = np.diff(cell)
        starts = np.concatenate([[0], np.flatnonzero(steps) + 1])
        at = cell[starts]
        self._count[at] += np.diff(np.append(starts, len(cell)))
        if "mean" in self._request.reductions:
            with np.errstate(over="ignore"):
                self._total[at] += np.add.reduceat(values, starts)
        if "min" in self._request.reductions:
            self._low[at] = np.minimum(self._low[at], np.minimum.reduceat(values, starts))
        if "max" in self._request.reductions:
            self._high[at] = np.maximum(self._high[at], np.maximum.reduceat(values, starts))

    def _column_of(self, step: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._columns is None:
            return np.searchsorted(self._edges, step, side="right") - 1
        column: NDArray[np.int64] = self._columns[step - self._edges[0]]
        return column

    def grid(self) -> Grid:
        """Return the grid of all added rows."""
        columns = max(1, self._shape[1] // self._usual_distance())
        bad = np.flatnonzero(self._nonfinite.reshape(self._shape).any(axis=0))
        if len(bad):
            columns = _aligned(columns, self._shape[1], int(bad[0]))
        starts = -(-np.arange(columns) * self._shape[1] // columns)
        shape = self._shape[0], columns
        count, total, low, high, nonfinite = (
            join.reduceat(cells.reshape(self._shape), starts, axis=1)
            for cells, join in (
                (self._count, np.add),
                (self._total, np.add),
                (self._low, np.minimum),
                (self._high, np.maximum),
                (self._nonfinite, np.add),
            )
        )
        with np.errstate(invalid="ignore"):
            mean = total / np.maximum(count, 1)
        for name, values in zip(REDUCTIONS, (mean, low, high), strict=True):
            values[count == 0 if name in self._request.reductions else np.ones(shape, np.bool_)] = np.nan
        edges = np.append(self._edges[starts], self._edges[-1])
        return Grid(self._request.tensors, edges, count, mean, low, high, nonfinite)

    def _usual_distance(self) -> int:
        """Return the usual distance between two measurements of a tensor, in columns."""
        measured = ((self._count > 0) | (self._nonfinite > 0)).reshape(self._shape)
        rows, columns = np.nonzero(measured)
        return usual_distance(np.diff(columns)[np.diff(rows) == 0])
