"""The summary of a finished run: the span of each statistic in each phase, read from the store with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from watchstep.format.tensors import MODES, TensorInfo
from watchstep.reading import queries
from watchstep.reading.columns import Columns, Want
from watchstep.reading.run import Run
from watchstep_rules.signals.ranges.baseline import (
    BASELINE_COLLECTIONS,
    MAX_PHASES,
    MAX_TENSORS,
    BaselineRun,
    BaselineTensor,
    Span,
    Statistic,
    statistic_of,
)

_ROWS_PER_PHASE = 500_000
"""Rows of a phase that are read at once; of longer phases some spans of steps, evenly spaced, are read."""

_SPANS = 4
_LOW, _HIGH = 0.05, 0.95
_MODES = (MODES.index("train"), MODES.index("global"))


def summarize_run(run: Run) -> BaselineRun:
    """Reduce a run to the spans of its statistics.

    Steps of the newest attempt are read, in train mode, and those of no mode. Shards are merged, and of replicas the first is taken.

    Args:
        run: finished or not.

    Raises:
        StoreError: the store cannot be read.
    """
    infos = run.index.tensors()
    chosen = _chosen(infos)
    spans: dict[str, dict[int, Span]] = {infos[place].name: {} for place in chosen}
    for phase, columns in _columns_by_phase(run):
        rows = _judged_rows(columns)
        order = rows[np.argsort(columns["tensor"][rows], kind="stable")]
        tensors = columns["tensor"][order]
        for own in np.split(order, np.flatnonzero(np.diff(tensors)) + 1):
            place = int(columns["tensor"][own[0]]) if len(own) else -1
            if place not in chosen:
                continue
            values = columns[chosen[place]][own]
            values = values[np.isfinite(values)]
            if len(values):
                low, high = (float(value) for value in np.quantile(values, [_LOW, _HIGH]))
                spans[infos[place].name][phase] = (low, high)
    return BaselineRun(
        tensors={
            infos[place].name: BaselineTensor(
                shape=infos[place].shape,
                statistic=statistic,
                phases=tuple(
                    spans[infos[place].name].get(phase) for phase in range(_end(spans[infos[place].name]))
                ),
            )
            for place, statistic in chosen.items()
            if spans[infos[place].name]
        }
    )


def _chosen(infos: Sequence[TensorInfo]) -> dict[int, Statistic]:
    """Place of a tensor among the run's → its statistic; losses first, then by the model's order."""
    rank = {name: place for place, (name, _) in enumerate(BASELINE_COLLECTIONS)}
    judged = {
        place: statistic for place, info in enumerate(infos) if (statistic := statistic_of(info)) is not None
    }
    order = sorted(
        judged, key=lambda place: min(rank[name] for name in infos[place].collections if name in rank)
    )
    return {place: judged[place] for place in order[:MAX_TENSORS]}


def _end(spans: Mapping[int, Span]) -> int:
    return max(spans, default=-1) + 1


def _judged_rows(columns: Columns) -> NDArray[np.intp]:
    """Rows in train mode and of no mode, of the first replica, and of the lowest worker that has the tensor."""
    rows = np.flatnonzero(np.isin(columns["mode"], _MODES) & (columns["replica"] == 0))
    lowest = np.full(int(columns["tensor"].max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest, columns["tensor"][rows], columns["worker"][rows])
    chosen: NDArray[np.intp] = rows[columns["worker"][rows] == lowest[columns["tensor"][rows]]]
    return chosen


def _columns_by_phase(run: Run) -> Iterator[tuple[int, Columns]]:
    first, last = run.index.reach()
    for phase in range(MAX_PHASES):
        start, end = 2**phase - 1, 2 ** (phase + 1) - 2
        if start > last or end < first:
            continue
        yield phase, _phase_columns(run, start, min(end, last))


def _phase_columns(run: Run, start: int, end: int) -> Columns:
    """The statistics of the steps from ``start`` to ``end``; of some spans of them where there are too many rows."""
    tensors = max(1, len(run.index.tensors()) * max(1, len(run.workers)))
    steps = max(_SPANS, _ROWS_PER_PHASE // tensors)
    if end - start + 1 <= steps:
        return _read(run, start, end)
    length = steps // _SPANS
    starts = np.linspace(start, end - length + 1, _SPANS).astype(np.int64)
    parts = [_read(run, int(begin), int(begin) + length - 1) for begin in starts]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _read(run: Run, first: int, last: int) -> Columns:
    want = Want((), None, first, last)
    return run.index.consistently(lambda: queries.columns_of(run.index, ("mean", "rms"), want, merge=True))
