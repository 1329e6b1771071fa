"""Binning of scalar rows of many tensors over the columns of one common grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Floats
from watchstep.format.tensors import MODES, Mode, TensorInfo
from watchstep.reading.columns import Columns
from watchstep_services.api.queries.answers import numbers, whole_numbers
from watchstep_services.api.schemas.binned_lines import BinnedLine, NewestValue

_MODE_ORDER = {mode: place for place, mode in enumerate(MODES)}


def grid_edges(first: int, last: int, points: int) -> NDArray[np.int64]:
    """Return the edges of at most ``points`` columns of nearly equal width from ``first`` to ``last``, both included; shape (n + 1,).

    A range with fewer positions has one column for each. An empty range has no column and no edge.
    """
    size = last - first + 1
    if size <= 0:
        return np.empty(0, np.int64)
    count = min(points, size)
    # Python integers: a range of nanoseconds times the number of columns exceeds 64 bits.
    return np.array([first + place * size // count for place in range(count + 1)], np.int64)


@dataclass(frozen=True)
class LineBins:
    """One tensor in one mode over n columns, of all workers or of one.

    Attributes:
        tensor: index of the tensor.
        mode: mode of the rows.
        workers: number of workers with rows.
        worker: rank of the only worker of a line per worker; None for a line of all workers.
        count: int64 of shape (n,), number of rows.
        mean, min, max: float64 of shape (n,), over finite values; NaN without any.
        last: float64 of shape (n,), value of the last row; NaN without rows.
        nonfinite: int64 of shape (n,), number of rows without a finite value.
        newest: position and value of the newest row; of several workers the mean, unless one is not finite. None without rows.
    """

    tensor: int
    mode: Mode
    workers: int
    count: NDArray[np.int64]
    mean: Floats
    min: Floats
    max: Floats
    last: Floats
    nonfinite: NDArray[np.int64]
    newest: tuple[int, float] | None = None
    worker: int | None = None


def bin_rows(
    columns: Columns,
    values: Floats,
    positions: NDArray[np.int64],
    edges: NDArray[np.int64],
    *,
    by_worker: bool = False,
) -> list[LineBins]:
    """Summarize rows by tensor, mode and column; by tensor and mode, ascending.

    Args:
        columns: ``tensor``, ``mode`` and ``worker`` of m rows.
        values: the value of each row, shape (m,).
        positions: the position of each row on the axis of the grid, shape (m,). Rows outside of the grid are ignored.
        edges: as from `grid_edges`.
        by_worker: whether each worker has lines of its own: a flag, or the load of a machine, has no mean.
    """
    if len(edges) < 2:
        return []
    rows = np.flatnonzero((positions >= edges[0]) & (positions < edges[-1]))
    bins = np.searchsorted(edges, positions[rows], side="right") - 1
    tensor, mode = columns["tensor"][rows].astype(np.int64), columns["mode"][rows].astype(np.int64)
    worker = columns["worker"][rows].astype(np.int64) if by_worker else np.full(len(rows), -1)
    order = np.lexsort([positions[rows], worker, mode, tensor])
    rows, bins, tensor, mode, worker = rows[order], bins[order], tensor[order], mode[order], worker[order]
    changed = (tensor[1:] != tensor[:-1]) | (mode[1:] != mode[:-1]) | (worker[1:] != worker[:-1])
    changes = np.flatnonzero(changed) + 1
    parts = np.split(np.arange(len(rows)), changes) if len(rows) else []
    return [
        replace(
            _line(
                int(tensor[part[0]]),
                MODES[mode[part[0]]],
                len(np.unique(columns["worker"][rows[part]])),
                bins[part],
                values[rows[part]].astype(np.float64),
                len(edges) - 1,
            ),
            newest=_newest(positions[rows[part]], values[rows[part]].astype(np.float64)),
            worker=int(worker[part[0]]) if by_worker else None,
        )
        for part in parts
    ]


def _newest(positions: NDArray[np.int64], values: Floats) -> tuple[int, float]:
    """Return the last position and its value; positions are ascending."""
    last = values[positions == positions[-1]]
    bad = last[~np.isfinite(last)]
    return int(positions[-1]), float(bad[0] if len(bad) else last.mean())


def _line(
    tensor: int, mode: Mode, workers: int, bins: NDArray[np.intp], values: Floats, size: int
) -> LineBins:
    """Summarize the rows of one line; ``bins`` are ascending."""
    starts = np.flatnonzero(np.append(True, bins[1:] != bins[:-1]))
    places = bins[starts]
    finite = np.isfinite(values)
    finite_count = np.add.reduceat(finite.astype(np.int64), starts)
    rows = np.diff(np.append(starts, len(bins)))
    with np.errstate(all="ignore"):
        # Divided before adding, so that the sum of large values does not overflow.
        shares = np.where(finite, values, 0.0) / np.repeat(np.maximum(finite_count, 1), rows)
        mean = np.add.reduceat(shares, starts)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)

    def spread(of_bins: Floats) -> Floats:
        result = np.full(size, np.nan)
        result[places] = np.where(finite_count > 0, of_bins, np.nan)
        return result

    last = np.full(size, np.nan)
    last[places] = values[starts + rows - 1]

    count, nonfinite = np.zeros(size, np.int64), np.zeros(size, np.int64)
    count[places], nonfinite[places] = rows, rows - finite_count
    return LineBins(tensor, mode, workers, count, spread(mean), spread(low), spread(high), last, nonfinite)


def earliest(
    positions: NDArray[np.int64], times: NDArray[np.int64], edges: NDArray[np.int64]
) -> list[int | None]:
    """Return the earliest time of the rows of each column; None without rows."""
    if len(edges) < 2:
        return []
    result = np.full(len(edges) - 1, np.iinfo(np.int64).max)
    rows = np.flatnonzero((positions >= edges[0]) & (positions < edges[-1]))
    bins = np.searchsorted(edges, positions[rows], side="right") - 1
    np.minimum.at(result, bins, times[rows].astype(np.int64))
    return [None if time == np.iinfo(np.int64).max else time for time in result.tolist()]


def empty_line(tensor: int, mode: Mode, size: int) -> LineBins:
    """Return a line without rows."""
    none, nothing = np.full(size, np.nan), np.zeros(size, np.int64)
    return LineBins(tensor, mode, 0, nothing, none, none, none, none, nothing)


def carried_forward(line: LineBins, before: float) -> LineBins:
    """Return a line whose columns without rows repeat the last value, from the value before the grid on; NaN for none."""
    recorded = np.flatnonzero(line.count > 0)
    # Index of the last column with rows at or before each column; -1: the value before the grid.
    latest = np.full(len(line.count), -1, np.int64)
    latest[recorded] = recorded
    latest = np.maximum.accumulate(latest)
    repeated = np.where(latest >= 0, line.last[np.maximum(latest, 0)], before)
    empty = line.count == 0

    def filled(column: Floats) -> Floats:
        return np.where(empty, repeated, column)

    return replace(line, mean=filled(line.mean), min=filled(line.min), max=filled(line.max))


def as_output(line: LineBins, info: TensorInfo, figure: str) -> BinnedLine:
    """Return a line as it is sent."""
    return BinnedLine(
        tensor=info.name,
        figure=figure,
        mode=line.mode,
        workers=line.workers,
        worker=line.worker,
        derived=info.derived and line.mode == "train",
        count=whole_numbers(line.count),
        mean=numbers(line.mean),
        min=numbers(line.min),
        max=numbers(line.max),
        nonfinite=whole_numbers(line.nonfinite),
        newest=None if line.newest is None else _newest_value(*line.newest),
    )


def _newest_value(step: int, value: float) -> NewestValue:
    return NewestValue(step=step, value=value if np.isfinite(value) else None, text=f"{value:.6g}")


def in_order(lines: Sequence[LineBins], infos: Sequence[TensorInfo]) -> list[LineBins]:
    """Return lines with those of training first, then in the model's order."""
    return sorted(
        lines,
        key=lambda line: (
            _MODE_ORDER[line.mode],
            infos[line.tensor].order,
            infos[line.tensor].name,
            -1 if line.worker is None else line.worker,
        ),
    )


def only(columns: Mapping[str, NDArray[np.generic]], chosen: NDArray[np.bool_]) -> Columns:
    """Return the chosen rows of columns."""
    return {name: column[chosen] for name, column in columns.items()}
