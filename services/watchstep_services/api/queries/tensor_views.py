"""Responses of the pictures of tensors, as models and as tables, from what the SDK reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from watchstep.format.statistics import Floats
from watchstep.format.tensors import Mode, TensorInfo
from watchstep.reading.binning import Line, Lines
from watchstep.reading.grid import Grid
from watchstep.reading.headroom import FORMATS, FormatShares, MagnitudeRange, Magnitudes, headroom_of
from watchstep.reading.module_tree import module_tree
from watchstep.reading.queries import REDUCTIONS, HistogramSeries, Reduce
from watchstep_services.api.queries.answers import (
    HistogramOutput,
    LineOutput,
    TensorEntry,
    numbers,
    whole_numbers,
)
from watchstep_services.api.queries.forms import View, as_float32, encode_matrices
from watchstep_services.api.queries.tensor_answers import (
    CellCounts,
    FormatHeadroomOutput,
    FormatSharesOutput,
    HeadroomOutput,
    HeatmapOutput,
    ModuleNode,
    NumberFormatOutput,
    TensorHeadroom,
    TensorNeighbours,
)

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_OF_MODULE = 100


def tensor_entry(info: TensorInfo) -> TensorEntry:
    """Return a tensor's description."""
    return TensorEntry.model_validate(
        {name: getattr(info, name) for name in TensorEntry.model_fields}, from_attributes=True
    )


def tensor_neighbours(infos: Sequence[TensorInfo], info: TensorInfo) -> TensorNeighbours:
    """Return the tensors beside a tensor.

    Args:
        infos: all tensors, in the model's order.
        info: one of them.
    """
    row = [other.name for other in infos if other.role == info.role]
    place = row.index(info.name)
    of_module = [other for other in infos if info.module and other.module == info.module]
    return TensorNeighbours(
        previous=row[place - 1] if place else None,
        next=row[place + 1] if place + 1 < len(row) else None,
        module=[tensor_entry(other) for other in of_module[:_MAX_OF_MODULE]],
    )


def heatmap_output(
    grid: Grid,
    infos: Sequence[TensorInfo],
    described: dict[str, Any],
    reductions: Sequence[Reduce],
    *,
    matrices: bool,
) -> HeatmapOutput:
    """Return a heatmap.

    Args:
        grid: the values.
        infos: descriptions of its tensors.
        described: the fields ``figure``, ``mode``, ``left_out``, ``first`` and ``last``.
        reductions: requested matrices.
        matrices: whether to include the matrices and the counts; otherwise they are empty.
    """
    low, high = _extremes([getattr(grid, name) for name in reductions])
    row, column = np.nonzero(grid.nonfinite) if matrices else (np.empty(0, np.intp),) * 2
    rows_of: dict[str, Any] = dict.fromkeys(REDUCTIONS)
    if matrices:
        rows_of.update({name: [numbers(row) for row in getattr(grid, name)] for name in reductions})
    return HeatmapOutput(
        **described,
        tensors=list(grid.tensors),
        layers=[tensor_entry(info) for info in infos],
        modules=[ModuleNode(**vars(module)) for module in module_tree(infos)],
        edges=whole_numbers(grid.edges),
        **rows_of,
        nonfinite=CellCounts(
            row=row.tolist(), column=column.tolist(), count=grid.nonfinite[row, column].tolist()
        ),
        low=low,
        high=high,
    )


def _extremes(matrices: Sequence[Floats]) -> tuple[float | None, float | None]:
    finite = [matrix[np.isfinite(matrix)] for matrix in matrices]
    finite = [values for values in finite if len(values)]
    if not finite:
        return None, None
    return min(float(values.min()) for values in finite), max(float(values.max()) for values in finite)


def heatmap_matrices(grid: Grid, described: HeatmapOutput, reductions: Sequence[Reduce]) -> View:
    """Return a heatmap's matrices as safetensors, with its other fields as the description."""
    excluded = {"edges", "nonfinite", *REDUCTIONS}
    matrices: dict[str, Any] = {"edges": grid.edges}
    matrices |= {name: as_float32(getattr(grid, name)) for name in reductions}
    matrices["nonfinite"] = np.minimum(grid.nonfinite, np.iinfo(np.uint32).max).astype(np.uint32)
    return encode_matrices(matrices, described.model_dump(mode="json", exclude=excluded))


def heatmap_table(grid: Grid) -> pa.Table:
    """Return a heatmap as rows; cells without rows are omitted."""
    import pyarrow as pa

    row, column = np.nonzero((grid.count > 0) | (grid.nonfinite > 0))
    names = pa.array(list(grid.tensors), pa.string())
    columns: dict[str, Any] = {
        "tensor": pa.DictionaryArray.from_arrays(pa.array(row.astype(np.int32)), names).cast(pa.string()),
        "first_step": grid.edges[column],
        "last_step": grid.edges[column + 1] - 1,
    }
    columns |= {name: _reals(getattr(grid, name)[row, column]) for name in REDUCTIONS}
    return pa.table({**columns, "nonfinite": grid.nonfinite[row, column]})


def _reals(values: Floats) -> pa.Array:
    """Return numbers with nulls for NaN."""
    import pyarrow as pa

    return pa.array(values, pa.float64(), from_pandas=True)


def headroom_output(magnitudes: Magnitudes, mode: Mode | None, left_out: int) -> HeadroomOutput:
    """Return the headroom of tensors."""
    return HeadroomOutput(
        formats=[NumberFormatOutput(**asdict(each)) for each in FORMATS],
        mode=mode,
        edges=whole_numbers(magnitudes.edges),
        largest=numbers(magnitudes.largest),
        smallest=numbers(magnitudes.smallest),
        tensors=[tensor_headroom(each) for each in magnitudes.tensors],
        left_out=left_out,
    )


def tensor_headroom(magnitude: MagnitudeRange, shares: Sequence[FormatShares] = ()) -> TensorHeadroom:
    """Return the headroom of one tensor."""
    largest, smallest = numbers(np.array([magnitude.largest, magnitude.smallest]))
    return TensorHeadroom(
        tensor=magnitude.tensor,
        largest=largest,
        largest_step=magnitude.largest_step,
        smallest=smallest,
        smallest_step=magnitude.smallest_step,
        formats=[
            FormatHeadroomOutput(**asdict(each))
            for each in headroom_of(magnitude.largest, magnitude.smallest)
        ],
        shares=[FormatSharesOutput(**asdict(each)) for each in shares],
    )


def headroom_table(magnitudes: Magnitudes) -> pa.Table:
    """Return the headroom as one row per tensor, with columns per format."""
    import pyarrow as pa

    tensors = magnitudes.tensors
    columns: dict[str, Any] = {
        "tensor": pa.array([each.tensor for each in tensors], pa.string()),
        "largest": _reals(np.array([each.largest for each in tensors], np.float64)),
        "largest_step": pa.array([each.largest_step for each in tensors], pa.int64()),
        "smallest": _reals(np.array([each.smallest for each in tensors], np.float64)),
        "smallest_step": pa.array([each.smallest_step for each in tensors], pa.int64()),
    }
    rooms = [headroom_of(each.largest, each.smallest) for each in tensors]
    for place, number_format in enumerate(FORMATS):
        of_format = [room[place] for room in rooms]
        columns[f"{number_format.name}_overflow_bits"] = pa.array(
            [each.overflow_bits for each in of_format], pa.float64()
        )
        columns[f"{number_format.name}_underflow_bits"] = pa.array(
            [each.underflow_bits for each in of_format], pa.float64()
        )
        columns[f"{number_format.name}_state"] = pa.array([each.state for each in of_format], pa.string())
    return pa.table(columns)


def histogram_output(tensor: str, histogram: HistogramSeries) -> HistogramOutput:
    """Return histograms over time."""
    return HistogramOutput(
        tensor=tensor,
        edges=whole_numbers(histogram.edges),
        lower=numbers(histogram.lower),
        upper=numbers(histogram.upper),
        counts=whole_numbers(histogram.counts),
        zeros=whole_numbers(histogram.zeros),
        nonfinite=whole_numbers(histogram.nonfinite),
        first=whole_numbers(histogram.first),
        last=whole_numbers(histogram.last),
    )


def histogram_table(histogram: HistogramSeries) -> pa.Table:
    """Return histograms over time as rows: the elements of one bin, zeros, or elements that are not finite; empty bins are omitted."""
    import pyarrow as pa

    row, column = np.nonzero(histogram.counts)
    zero, bad = np.flatnonzero(histogram.zeros), np.flatnonzero(histogram.nonfinite)
    rows = np.concatenate([row, zero, bad])
    kinds = np.repeat([0, 1, 2], [len(row), len(zero), len(bad)])
    order = np.argsort(rows, kind="stable")
    rest = (np.zeros(len(zero)), np.full(len(bad), np.nan))
    names = pa.array(["finite", "zero", "nonfinite"], pa.string())
    kind = pa.DictionaryArray.from_arrays(pa.array(kinds[order].astype(np.int8)), names).cast(pa.string())
    counts = (histogram.counts[row, column], histogram.zeros[zero], histogram.nonfinite[bad])
    return pa.table(
        {
            "first_step": histogram.edges[rows][order],
            "last_step": (histogram.edges[rows + 1] - 1)[order],
            "kind": kind,
            "lower": _reals(np.concatenate([histogram.lower[column], *rest])[order]),
            "upper": _reals(np.concatenate([histogram.upper[column], *rest])[order]),
            "count": np.concatenate(counts)[order],
        }
    )


def line_output(line: Line) -> LineOutput:
    """Return a line of a series."""
    return LineOutput(
        mode=line.mode,
        worker=line.worker,
        replica=line.replica,
        stage=line.stage,
        step=whole_numbers(line.step),
        last_step=whole_numbers(line.last_step),
        count=whole_numbers(line.count),
        mean=numbers(line.mean),
        min=numbers(line.min),
        max=numbers(line.max),
        nonfinite=whole_numbers(line.nonfinite),
    )


def series_table(lines: Lines) -> pa.Table:
    """Return all lines in one table with the columns of `LineOutput`; null marks a missing finite value."""
    import pyarrow as pa

    kinds = {"mode": pa.string(), "worker": pa.int32(), "replica": pa.int32(), "stage": pa.string()}
    whole = ("step", "last_step", "count", "nonfinite")
    real = ("mean", "min", "max")
    schema = pa.schema(
        [*kinds.items(), *((name, pa.int64()) for name in whole), *((name, pa.float64()) for name in real)]
    )
    parts = [
        pa.table({name: pa.array([], kind.type) for name, kind in zip(schema.names, schema, strict=True)})
    ]
    for line in lines.lines:
        size = len(line.step)
        columns = {name: pa.array([getattr(line, name)] * size, kind) for name, kind in kinds.items()}
        columns |= {name: pa.array(getattr(line, name), pa.int64()) for name in whole}
        columns |= {name: _reals(getattr(line, name)) for name in real}
        parts.append(pa.table(columns, schema=schema))
    return pa.concat_tables(parts)
