"""A figure over the steps, in no more points than a screen has: several steps become one point with its mean and extremes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import STAGES
from watchstep.format.statistics import Floats
from watchstep.format.tensors import MODES, Mode
from watchstep.reading.columns import Columns, Want
from watchstep.reading.queries import columns_of
from watchstep.reading.run import Run

MAX_LINES = 64
"""Most lines of an answer: a line for each mode, worker with a whole tensor, replica and stage."""

_KEYS = ("mode", "worker", "replica", "stage")


@dataclass(frozen=True)
class SeriesRequest:
    """What is asked for; see `Run.series`."""

    tensor: str
    figure: str
    worker: int | None
    mode: Mode | None
    first: int
    last: int
    points: int


@dataclass(frozen=True)
class Line:
    """One line; its columns have the same length, steps ascending.

    Attributes:
        mode: of its rows.
        worker: the lowest, where shards merged.
        replica: which.
        stage: local or reduced.
        step: the first step of each point.
        last_step: the last step of each point.
        count: rows of each point.
        mean: of its finite values; NaN where it has none.
        min: the smallest of them.
        max: the largest of them.
        nonfinite: rows without a finite value.
    """

    mode: str
    worker: int
    replica: int
    stage: str
    step: NDArray[np.int64]
    last_step: NDArray[np.int64]
    count: NDArray[np.int64]
    mean: Floats
    min: Floats
    max: Floats
    nonfinite: NDArray[np.int64]


@dataclass(frozen=True)
class Lines:
    """The lines, and how many more there are than an answer holds."""

    lines: list[Line]
    left_out: int


def read_lines(run: Run, asked: SeriesRequest) -> Lines:
    """Read and bin.

    Raises:
        ConfigError: there is no such figure.
        NotFoundError: there is no such tensor.
        OverBudgetError: it takes more than the run's budget.
    """
    run.check_tensors([asked.tensor])
    want = Want((), frozenset([asked.tensor]), asked.first, asked.last)
    merge = asked.worker is None
    held = run.index.consistently(lambda: columns_of(run.index, [asked.figure], want, merge=merge))
    chosen = np.ones(len(held["step"]), np.bool_)
    if asked.worker is not None:
        chosen &= held["worker"] == asked.worker
    if asked.mode is not None:
        chosen &= held["mode"] == MODES.index(asked.mode)
    rows = np.flatnonzero(chosen)
    groups = list(_groups(held, rows))
    return Lines([_line(held, group, asked) for group in groups[:MAX_LINES]], max(0, len(groups) - MAX_LINES))


def _groups(held: Columns, rows: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Rows of each line, by step."""
    if not len(rows):
        return
    order = rows[np.lexsort([held["step"][rows], *(held[name][rows] for name in reversed(_KEYS))])]
    changes = np.zeros(len(order), np.bool_)
    for name in _KEYS:
        changes[1:] |= held[name][order][1:] != held[name][order][:-1]
    yield from np.split(order, np.flatnonzero(changes))


def _line(held: Columns, rows: NDArray[np.intp], asked: SeriesRequest) -> Line:
    step = held["step"][rows].astype(np.int64)
    value = held[asked.figure][rows].astype(np.float64)
    starts = _starts(step, asked.points)
    ends = np.append(starts[1:], len(rows))
    finite = np.isfinite(value)
    good = np.add.reduceat(finite.astype(np.int64), starts)
    with np.errstate(all="ignore"):
        mean = np.add.reduceat(
            np.where(finite, value, 0.0) / np.repeat(np.maximum(good, 1), ends - starts), starts
        )
        low = np.minimum.reduceat(np.where(finite, value, np.inf), starts)
        high = np.maximum.reduceat(np.where(finite, value, -np.inf), starts)
    first = rows[0]
    return Line(
        mode=MODES[held["mode"][first]],
        worker=int(held["worker"][first]),
        replica=int(held["replica"][first]),
        stage=STAGES[held["stage"][first]],
        step=step[starts],
        last_step=step[ends - 1],
        count=ends - starts,
        mean=np.where(good > 0, mean, np.nan),
        min=np.where(good > 0, low, np.nan),
        max=np.where(good > 0, high, np.nan),
        nonfinite=(ends - starts) - good,
    )


def _starts(step: NDArray[np.int64], points: int) -> NDArray[np.intp]:
    """Where each point's rows begin: one point for each row where they are few, else for steps of equal reach."""
    if len(step) <= points:
        return np.arange(len(step))
    reach = int(step[-1]) - int(step[0]) + 1
    width = -(-reach // points)
    bins = (step - step[0]) // width
    return np.flatnonzero(np.append(True, bins[1:] != bins[:-1]))
