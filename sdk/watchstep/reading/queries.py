"""Queries with bounded results: series, heatmaps, histograms over time and losses; shards are merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.block import STAGES, from_codes, from_numbers
from watchstep.format.segment_checks import PROBE
from watchstep.format.statistics import (
    Floats,
    Histograms,
    exponent_of_bin,
    is_negative_bin,
    merge_rows,
    sum_rows,
)
from watchstep.format.tensors import LOSSES, MODES, Mode, mode_index
from watchstep.reading.columns import (
    COUNTED,
    IDENTITY,
    NO_CUT,
    Columns,
    Selection,
    batch_of,
    figure_of,
    needs_of,
)
from watchstep.reading.index import RunIndex

if TYPE_CHECKING:
    import pyarrow as pa


def merged(columns: Columns) -> Columns:
    """Merge the shards of each (step, mode, tensor, replica, stage), workers in ascending order.

    Args:
        columns: `IDENTITY` and `COUNTED`, and optionally probes and ``time_ns``, n rows.

    Returns:
        The same columns. A merged row has the lowest worker of its shards, as for rules, and that worker's time. Its
        probes are NaN, because those of the whole tensor do not follow from those of its shards.
    """
    names = (*IDENTITY, *COUNTED)
    others = [name for name in columns if name not in names]
    sharded = columns["shard_count"] > 1
    parts = {name: columns[name][sharded] for name in names}
    order = np.lexsort([parts[key] for key in ("worker", "stage", "replica", "tensor", "mode", "step")])
    parts = {name: column[order] for name, column in parts.items()}
    starts = np.ones(len(order), np.bool_)
    starts[1:] = False
    for key in ("step", "mode", "tensor", "replica", "stage"):
        starts[1:] |= parts[key][1:] != parts[key][:-1]
    first = np.flatnonzero(starts)
    figures = merge_rows(batch_of(parts), np.cumsum(starts) - 1, len(first))
    merged_columns = {name: parts[name][first] for name in IDENTITY}
    merged_columns["shard_count"] = np.ones_like(merged_columns["shard_count"])
    merged_columns |= {name: getattr(figures, name) for name in COUNTED}
    for name in others:
        of_first = columns[name][sharded][order][first]
        merged_columns[name] = np.full(len(first), np.nan) if name.startswith(PROBE) else of_first
    return {
        name: np.concatenate([columns[name][~sharded], merged_columns[name]]) for name in (*names, *others)
    }


Reduce = Literal["mean", "min", "max"]
REDUCTIONS: tuple[Reduce, ...] = ("mean", "min", "max")


@dataclass(frozen=True)
class Heatmap:
    """A figure of many tensors over the steps, in bins.

    Attributes:
        tensors: names, in the model's order; m of them.
        edges: int64 of shape (n + 1,); bin i covers the steps edges[i] … edges[i + 1] - 1.
        values: float64 of shape (m, n); NaN if a bin has no finite value.
    """

    tensors: list[str]
    edges: NDArray[np.int64]
    values: Floats


@dataclass(frozen=True)
class HistogramSeries:
    """Exponent histograms of one tensor over the steps, in bins of steps.

    A bin without a measurement is a gap, and has no element.

    Attributes:
        edges: int64 of shape (n + 1,); row i covers the steps edges[i] … edges[i + 1] - 1.
        lower: float64 of shape (m,); elements of column j are between lower[j] and upper[j], ascending.
        upper: float64 of shape (m,).
        counts: int64 of shape (n, m); elements, added over the steps of a row.
        zeros: int64 of shape (n,); elements equal to zero, which are in no column.
        nonfinite: int64 of shape (n,).
        first: int64 of shape (n,); the first measured step of each row, -1 for none.
        last: int64 of shape (n,); the last measured step of each row, -1 for none.
    """

    edges: NDArray[np.int64]
    lower: Floats
    upper: Floats
    counts: NDArray[np.int64]
    zeros: NDArray[np.int64]
    nonfinite: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]


def columns_of(index: RunIndex, figures: Sequence[str], selection: Selection, *, merge: bool) -> Columns:
    """Return identity columns of the selected rows, and figures by name; shards merged on request.

    Raises:
        ConfigError: a figure does not exist.
    """
    probes = index.probes()
    needs = tuple(name for figure in figures for name in needs_of(figure, probes))
    columns = index.collect(Selection(needs, selection.tensors, selection.first, selection.last))
    if merge and (columns["shard_count"] > 1).any():
        others = tuple(name for name in needs if name not in COUNTED)
        columns = merged(
            index.collect(Selection((*COUNTED, *others), selection.tensors, selection.first, selection.last))
        )
    return {**columns, **{figure: figure_of(columns, figure) for figure in figures}}


def as_table(index: RunIndex, data: Columns, figures: Sequence[str], chosen: NDArray[np.bool_]) -> pa.Table:
    """Return the chosen rows with the figures, by (step, mode, tensor, worker, replica, stage); null for NaN."""
    import pyarrow as pa

    rows = np.flatnonzero(chosen)
    keys = [data[name][rows] for name in ("stage", "replica", "worker", "tensor", "mode", "step")]
    rows = rows[np.lexsort(keys)]
    names = [info.name for info in index.tensors()]
    words: dict[str, Sequence[str]] = {"mode": MODES, "stage": STAGES, "tensor": names}

    def word(name: str) -> pa.Array:
        used, codes = np.unique(data[name][rows], return_inverse=True)
        return from_codes(codes, [words[name][code] for code in used])

    columns = {
        "step": from_numbers(data["step"][rows].astype(np.int64)),
        "mode": word("mode"),
        "tensor": word("tensor"),
        "worker": from_numbers(data["worker"][rows].astype(np.int32)),
        "replica": from_numbers(data["replica"][rows].astype(np.int32)),
        "stage": word("stage"),
    }
    return pa.table(
        {**columns, **{name: from_numbers(data[name][rows], nan_is_null=True) for name in figures}}
    )


_USUAL = 0.9
"""Quantile of the distances between measurements that counts as usual: a longer one is a gap."""


def usual_distance(distances: NDArray[np.integer[Any]]) -> int:
    """Return the usual distance between two measurements, so that a column of this width has one; 1 without any."""
    return max(1, int(np.quantile(distances, _USUAL, method="lower"))) if len(distances) else 1


def edges_between(first: int, last: int, bins: int) -> NDArray[np.int64]:
    """Return the edges of at most ``bins`` bins of nearly equal width; one bin per step if there are fewer steps."""
    steps = max(0, last - first + 1)
    count = max(1, min(bins, steps))
    # Python integers: a range of steps times the number of bins exceeds 64 bits.
    return np.array([first + place * steps // count for place in range(count + 1)], np.int64)


def histogram(
    index: RunIndex,
    tensor: str,
    steps: int,
    worker: int | None,
    mode: Mode | None,
    within: tuple[int, int] = (0, NO_CUT),
) -> HistogramSeries:
    """See `Run.histogram`; ``within`` is the first and the last step."""
    if steps < 1:
        raise ConfigError(f"invalid number of steps {steps}", "use 1 or more")
    selection = Selection((), frozenset([tensor]), *within)
    identity_columns = index.collect(selection)
    lead = _Lead.of(identity_columns, worker, mode)
    step = identity_columns["step"][lead.rows(identity_columns)]
    if not len(step):
        raise NotFoundError(
            f"tensor {tensor!r} has no row of mode {mode} and worker {worker}",
            "see Tensor.steps() and .workers",
        )
    edges = edges_between(int(step.min()), int(step.max()), steps)
    rows = len(edges) - 1
    measured = np.unique(step).astype(np.int64)
    starts = np.searchsorted(measured, edges)
    has_record = starts[1:] > starts[:-1]
    firsts = np.where(has_record, measured[np.minimum(starts[:-1], len(measured) - 1)], -1)
    lasts = np.where(has_record, measured[starts[1:] - 1], -1)
    zeros, nonfinite = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    sums = Histograms.empty(rows)
    counted = replace(selection, columns=("zero", "nan", "pos_inf", "neg_inf"))
    for columns, histograms in index.histograms(
        counted
    ):  # summed one by one, because all may not fit into memory
        of_lead = np.flatnonzero(lead.rows(columns))
        group = np.searchsorted(edges, columns["step"][of_lead], side="right") - 1
        parts = [sums, sum_rows(histograms.take(of_lead), group, rows)]
        sums = sum_rows(Histograms.concatenate(parts), np.tile(np.arange(rows), 2), rows)
        bad = columns["nan"] + columns["pos_inf"] + columns["neg_inf"]
        np.add.at(zeros, group, columns["zero"][of_lead])
        np.add.at(nonfinite, group, bad[of_lead])
    sums_of_bins = sums
    bins = np.unique(sums_of_bins.bins)
    sign = np.where(is_negative_bin(bins), -1.0, 1.0)
    power = exponent_of_bin(bins).astype(np.int64)
    with np.errstate(over="ignore"):
        near, far = sign * np.ldexp(1.0, power), sign * np.ldexp(1.0, power + 1)
    order = np.argsort(near)
    counts = np.zeros((rows, len(bins)), np.int64)
    counts[
        np.repeat(np.arange(rows), np.diff(sums_of_bins.offsets)), np.searchsorted(bins, sums_of_bins.bins)
    ] = sums_of_bins.counts
    return HistogramSeries(
        edges,
        np.minimum(near, far)[order],
        np.maximum(near, far)[order],
        counts[:, order],
        zeros,
        nonfinite,
        firsts,
        lasts,
    )


@dataclass(frozen=True)
class _Lead:
    """Selection of the rows that represent one tensor: those of one worker; else those of the first replica and stage.

    Attributes:
        values: column of `IDENTITY` → the value of its rows.
        whole_of: the worker whose rows of the whole tensor are included with those of shards; None for all workers.
    """

    values: Mapping[str, int]
    whole_of: int | None = None

    @classmethod
    def of(cls, columns: Columns, worker: int | None, mode: Mode | None) -> _Lead:
        lead = cls({} if mode is None else {"mode": mode_index(mode)})
        if worker is not None:
            return cls({**lead.values, "worker": worker})
        for name in ("stage", "replica"):
            remaining = columns[name][lead.rows(columns)]
            if not len(remaining):
                return lead
            lead = cls({**lead.values, name: int(remaining.min())})
        whole = columns["worker"][lead.rows(columns) & (columns["shard_count"] == 1)]
        return cls(lead.values, int(whole.min()) if len(whole) else None)

    def rows(self, columns: Columns) -> NDArray[np.bool_]:
        """Return a mask of shape (n,)."""
        chosen = np.ones(len(columns["step"]), np.bool_)
        for name, value in self.values.items():
            chosen &= columns[name] == value
        if self.whole_of is not None:
            chosen &= (columns["shard_count"] != 1) | (columns["worker"] == self.whole_of)
        return chosen


_FIGURES = ("mean", "count", "nan", "pos_inf", "neg_inf")


def losses_of(index: RunIndex) -> pa.Table:
    """Return `watchstep.Run.losses`."""
    import pyarrow as pa

    names_of_losses = frozenset(info.name for info in index.tensors() if LOSSES in info.collections)
    columns = (*_FIGURES, "shard_index")
    rows = index.consistently(lambda: index.collect(Selection(columns, names_of_losses)))
    infos = index.tensors()
    names = [info.name for info in infos]
    ranks = np.empty(len(names), np.int64)
    ranks[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    # The place decides between rows of one loss, so that compaction, which orders by it, changes no answer.
    places = (rows["stage"], rows["replica"], rows["shard_index"])
    order = np.lexsort((*places, ranks[rows["tensor"]], rows["mode"], rows["worker"], rows["step"]))
    tensor = rows["tensor"][order]
    is_train = rows["mode"][order] == MODES.index(
        "train"
    )  # losses of other modes are never found at ``backward()``
    return pa.table(
        {
            "step": rows["step"][order],
            "mode": [MODES[mode] for mode in rows["mode"][order]],
            "worker": rows["worker"][order].astype(np.int32),
            "name": from_codes(tensor, names),
            "value": loss_values(rows)[order],
            "count": rows["count"][order],
            "derived": np.array([info.derived for info in infos], np.bool_)[tensor] & is_train,
        },
        schema=pa.schema(
            [
                ("step", "int64"),
                ("mode", "string"),
                ("worker", "int32"),
                ("name", pa.dictionary(pa.int32(), pa.string())),
                ("value", "float64"),
                ("count", "int64"),
                ("derived", "bool"),
            ]
        ),
    )


def loss_values(rows: Columns) -> Floats:
    """Return the mean loss of each row including non-finite losses, i.e. their IEEE 754 sum divided by their number.

    Args:
        rows: the columns ``mean`` (of the finite ones), ``nan``, ``pos_inf`` and ``neg_inf``.
    """
    values = np.array(rows["mean"], np.float64)
    values[rows["pos_inf"] > 0] = np.inf
    values[rows["neg_inf"] > 0] = -np.inf
    values[(rows["nan"] > 0) | ((rows["pos_inf"] > 0) & (rows["neg_inf"] > 0))] = np.nan
    return values
