"""Where two runs diverge: the first step and tensor with different figures, and all differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError
from watchstep.format.block import from_codes
from watchstep.format.segment import PROBE
from watchstep.format.statistics import COUNT_COLUMNS, Floats
from watchstep.format.tensors import MODES, SYSTEM
from watchstep.reading.columns import COUNTED, Columns, Selection
from watchstep.reading.run import Run

if TYPE_CHECKING:
    import pyarrow as pa

_KEY = ("step", "mode", "tensor", "worker", "replica", "stage")


@dataclass(frozen=True)
class RunDifference:
    """Differences between two runs.

    Attributes:
        step: the first step with a difference; None if there is none.
        tensor: the first tensor at that step, in the model's order; None if there is none.
        table: all differences: step, mode, tensor, worker, figure, a, b, relative; by step and the model's order.
        compared: number of rows that both runs have.
        only_a: tensors of the first run only.
        only_b: tensors of the second run only.
    """

    step: int | None
    tensor: str | None
    table: pa.Table
    compared: int
    only_a: list[str]
    only_b: list[str]


def diff(run_a: Run, run_b: Run, tolerance: float = 0.0) -> RunDifference:
    """Compare the figures of two runs, row by row of the default views, with shards as recorded.

    Probes are compared if both runs have them. Figures of the process and its machine always differ, and are
    omitted.

    Two figures differ if ``|a - b| > tolerance * scale``, or if one of them is missing. The scale is the larger
    magnitude; for counts, the number of elements; for a mean, the mean magnitude, because a mean close to zero by cancellation
    has no significant digits. Memory: some 300 bytes for each row of both.

    Raises:
        ConfigError: the tolerance is negative.
        StoreError: a run cannot be read.
    """
    if not tolerance >= 0:
        raise ConfigError(f"tolerance {tolerance} is negative", "use 0 for bitwise equality, or e.g. 1e-5")
    names_a, names_b = (_compared(run) for run in (run_a, run_b))
    names = [*dict.fromkeys([*names_a, *names_b])]
    probes = sorted({*run_a.index.probes()} & {*run_b.index.probes()})
    figures = (*COUNTED, *(PROBE + probe for probe in probes))
    a, b = (_rows(run, names, figures) for run in (run_a, run_b))
    left, right = _common(a, b)
    a, b = (
        {name: column[rows] for name, column in columns.items()} for columns, rows in ((a, left), (b, right))
    )
    order = np.lexsort([a[name] for name in ("worker", "mode", "tensor", "step")])
    a, b = ({name: column[order] for name, column in columns.items()} for columns in (a, b))
    table = _table(a, b, (names, figures), tolerance)
    return RunDifference(
        table["step"][0].as_py() if table.num_rows else None,
        table["tensor"][0].as_py() if table.num_rows else None,
        table,
        len(left),
        [name for name in names if name not in names_b],
        [name for name in names if name not in names_a],
    )


def _compared(run: Run) -> list[str]:
    return [info.name for info in run.catalogue if SYSTEM not in info.collections]


def _rows(run: Run, names: list[str], figures: tuple[str, ...]) -> Columns:
    index = run.index
    columns = index.consistently(lambda: index.collect(Selection((*figures, "shard_index"))))
    ranks_by_name = {name: rank for rank, name in enumerate(names)}
    ranks = np.array([ranks_by_name.get(info.name, -1) for info in index.tensors()] or [0], np.int64)[
        columns["tensor"]
    ]
    return {name: column[ranks >= 0] for name, column in {**columns, "tensor": ranks}.items()}


def _common(a: Columns, b: Columns) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return rows of both with the same key; of rows with equal keys, the first."""
    both = {name: np.concatenate([a[name], b[name]]).astype(np.int64) for name in (*_KEY, "shard_index")}
    order = np.lexsort([*both.values()])
    starts = np.ones(len(order), np.bool_)
    if len(order):
        starts[1:] = np.any([column[order][1:] != column[order][:-1] for column in both.values()], axis=0)
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(starts) - 1
    size = len(a["step"])
    groups_a, first_a = np.unique(group[:size], return_index=True)
    groups_b, first_b = np.unique(group[size:], return_index=True)
    _, in_a, in_b = np.intersect1d(groups_a, groups_b, assume_unique=True, return_indices=True)
    return first_a[in_a], first_b[in_b]


def _scale(a: Columns, b: Columns, figure: str) -> Floats:
    if figure == "count":
        return np.fmax(a[figure], b[figure]).astype(np.float64)
    if figure in COUNT_COLUMNS:
        return np.fmax(a["count"], b["count"]).astype(np.float64)
    if figure == "mean":
        with np.errstate(all="ignore"):
            shares = [columns["abs_sum"] / np.maximum(columns["count"], 1) for columns in (a, b)]
        return np.fmax(*shares)
    scale: Floats = np.fmax(np.abs(a[figure]), np.abs(b[figure]))
    return scale


def _table(a: Columns, b: Columns, keys: tuple[list[str], tuple[str, ...]], tolerance: float) -> pa.Table:
    """Return `RunDifference.table`; ``keys`` are the names of tensors and figures."""
    import pyarrow as pa

    names, compared = keys
    rows, figures, relatives = [], [], []
    for index, figure in enumerate(compared):
        x, y = a[figure].astype(np.float64), b[figure].astype(np.float64)
        scale = _scale(a, b, figure)
        with np.errstate(all="ignore"):
            distance = np.abs(x - y)
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            differs = ~same & ~(distance <= tolerance * scale)
            relatives.append((distance / scale)[differs])
        rows.append(np.flatnonzero(differs))
        figures.append(np.full(len(rows[-1]), index))
    row, figure_at = np.concatenate(rows), np.concatenate(figures)
    order = np.lexsort([figure_at, row])
    row, figure_at = row[order], figure_at[order]

    def values(columns: Columns) -> Floats:
        result = np.full(len(row), np.nan)
        for index, name in enumerate(compared):
            result[figure_at == index] = columns[name][row[figure_at == index]]
        return result

    return pa.table(
        {
            "step": a["step"][row],
            "mode": from_codes(a["mode"][row], MODES),
            "tensor": from_codes(a["tensor"][row], names),
            "worker": a["worker"][row],
            "figure": from_codes(figure_at, compared),
            "a": pa.array(values(a), from_pandas=True),
            "b": pa.array(values(b), from_pandas=True),
            "relative": pa.array(np.concatenate(relatives)[order], from_pandas=True),
        }
    )
