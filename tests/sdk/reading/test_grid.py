from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sdk.format.blocks import Row, block_of, blocks
from tests.sdk.reading.stored import FIRST, SECOND, new_run, sharded_rows, small_run, write
from watchstep import open_run
from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.block import Block
from watchstep.format.statistics import abs_max
from watchstep.reading.binning import bin_values
from watchstep.reading.budget import OverBudgetError, ReadBudget
from watchstep.reading.compaction import compact
from watchstep.reading.grid import Grid, GridRequest
from watchstep.reading.run import Run

# Grids equal a direct computation from the rows, for any range of steps, before and after a compaction.


NAN = math.nan


def direct(run: Run, request: GridRequest, edges: list[int]) -> dict[tuple[int, int], list[float]]:
    """Values of each cell, row by row."""
    rows = run.rows()
    values = abs_max(rows.statistics)
    cells: dict[tuple[int, int], list[float]] = {}
    for place in range(len(rows)):
        name, step = rows.info(place).name, int(rows.step[place])
        is_chosen = name in request.tensors and rows.mode_name(place) == request.mode
        is_chosen &= request.worker in {None, int(rows.worker[place])}
        if is_chosen and edges[0] <= step < edges[-1]:
            column = next(column for column in range(len(edges) - 1) if step < edges[column + 1])
            cells.setdefault((request.tensors.index(name), column), []).append(float(values[place]))
    return cells


def check(run: Run, request: GridRequest) -> Grid:
    grid = run.grid(request)
    edges = grid.edges.tolist()
    assert len(edges) - 1 <= request.columns
    assert edges == sorted(edges)
    cells = direct(run, request, edges)
    for row, column in np.ndindex(grid.mean.shape):
        finite = [value for value in cells.get((row, column), []) if math.isfinite(value)]
        assert grid.count[row, column] == len(finite)
        found = [float(matrix[row, column]) for matrix in (grid.mean, grid.min, grid.max)]
        if not finite:
            assert np.isnan(found).all()
            continue
        assert found[1:] == [min(finite), max(finite)]
        assert found[0] == pytest.approx(math.fsum(finite) / len(finite), rel=1e-9)
    return grid


@pytest.mark.ci
@settings(max_examples=40, deadline=None)
@given(blocks, blocks, st.integers(0, 12), st.integers(0, 12), st.integers(1, 12), st.booleans())
def test_a_grid_is_computed_from_the_rows(
    first: Block, second: Block, begin: int, width: int, columns: int, compacted: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = new_run(Path(folder))
        write(store, [first], "a")
        write(store, [second], "b", "w1")
        run = open_run(Path(folder) / "default" / "r")
        rows = run.rows()
        whole = rows.places.shard_count == 1
        names = tuple(sorted({rows.info(int(row)).name for row in np.flatnonzero(whole)}))
        sharded = {rows.info(int(row)).name for row in np.flatnonzero(~whole)}
        names = tuple(name for name in names if name not in sharded)
        if not names:
            return
        request = GridRequest(names, "abs_max", columns, "train", begin, begin + width, nonfinite=True)
        grid = check(run, request)
        if compacted:
            compact(Path(folder) / "default" / "r", delete_after=0)
            again = open_run(Path(folder) / "default" / "r").grid(request)
            for name in ("edges", "count", "min", "max", "nonfinite"):
                np.testing.assert_array_equal(getattr(again, name), getattr(grid, name))
            np.testing.assert_allclose(again.mean, grid.mean, rtol=1e-12)


def test_a_range_has_its_own_columns(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path))
    grid = run.grid(GridRequest((SECOND.name, FIRST.name), "max", 3, first=3, last=8))
    assert grid.edges.tolist() == [3, 5, 7, 9]
    assert grid.max.tolist() == [[5.0, 7.0, 9.0], [5.0, 7.0, 9.0]]
    assert grid.mean[0].tolist() == [4.5, 6.5, 8.5]
    assert grid.count.tolist() == [[2, 2, 2], [2, 2, 2]]
    beyond = run.grid(GridRequest((FIRST.name,), "max", 3, first=100, last=200))
    assert np.isnan(beyond.mean).all()


def test_elements_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    rows = [Row(step, FIRST, [NAN, math.inf, 1.0] if step == 2 else [1.0]) for step in range(4)]
    rows += [Row(3, FIRST, [-math.inf], mode="eval"), Row(3, SECOND, [NAN])]
    write(new_run(tmp_path), [block_of(rows)])
    url = tmp_path / "default" / "r"
    for _ in range(2):
        grid = open_run(url).grid(GridRequest((FIRST.name, SECOND.name), "max", 4, nonfinite=True))
        assert grid.nonfinite.tolist() == [[0, 0, 2, 0], [0, 0, 0, 1]]
        assert np.isnan(grid.max[1]).all()
        compact(url, delete_after=0)
    assert not open_run(url).grid(GridRequest((FIRST.name,), "max", 4)).nonfinite.any()


def test_shards_are_merged(tmp_path: Path) -> None:
    write(new_run(tmp_path), [block_of(sharded_rows(range(6), 4))])
    run = open_run(tmp_path / "default" / "r")
    grid = run.grid(GridRequest((FIRST.name,), "l2", 2))
    expected = run.series(FIRST.name, "l2")["l2"].to_numpy()
    assert grid.count.tolist() == [[3, 3]]
    np.testing.assert_allclose(grid.mean[0], [expected[:3].mean(), expected[3:].mean()])
    assert grid.max[0].tolist() == [expected[:3].max(), expected[3:].max()]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"figure": "nothing"}, ConfigError),
        ({"columns": 0}, ConfigError),
        ({"mode": "nothing"}, ConfigError),
        ({"tensors": ("nothing",)}, NotFoundError),
    ],
)
def test_invalid_requests(tmp_path: Path, changes: dict[str, object], error: type[Exception]) -> None:
    run = open_run(small_run(tmp_path))
    request = GridRequest(**{"tensors": (FIRST.name,), "figure": "max", **changes})  # type: ignore[arg-type]
    with pytest.raises(error):
        run.grid(request)


def test_the_cells_are_part_of_the_budget(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path))
    run.index.budget = ReadBudget(60, 0.0001)
    with pytest.raises(OverBudgetError):
        run.grid(GridRequest((FIRST.name,), "max", 12))


def test_columns_are_as_wide_as_the_usual_distance_of_measurements_and_a_longer_one_is_a_gap(
    tmp_path: Path,
) -> None:
    steps = (*range(0, 100, 10), *range(150, 201, 10))
    rows = [Row(step, info, [float(step + 1)]) for step in steps for info in (FIRST, SECOND)]
    write(new_run(tmp_path), [block_of(rows)])
    run = open_run(tmp_path / "default" / "r")
    grid = run.grid(GridRequest((FIRST.name, SECOND.name), "max", 500))
    histogram = run.histogram(FIRST.name, 500)
    assert set(np.diff(grid.edges)) <= {10, 11}
    gaps = [int(grid.edges[column]) for column in np.flatnonzero(grid.count[0] == 0)]
    assert gaps[0] > 90
    assert gaps[-1] < 150
    assert len(gaps) in (4, 5)
    assert grid.count.sum(axis=1).tolist() == [len(steps)] * 2
    # A distribution is read step by step: joined rows would be no distribution of any step.
    has_record = histogram.first >= 0
    assert np.flatnonzero(has_record).tolist() == list(steps)
    assert histogram.first[has_record].tolist() == histogram.last[has_record].tolist() == list(steps)


def test_a_very_long_run(tmp_path: Path) -> None:
    rows = [Row(step, FIRST, [float(step)]) for step in (0, 1 << 30, 1 << 40)]
    write(new_run(tmp_path), [block_of(rows)])
    grid = open_run(tmp_path / "default" / "r").grid(GridRequest((FIRST.name,), "max", 2))
    assert grid.count.tolist() == [[2, 1]]
    assert grid.max.tolist() == [[float(1 << 30), float(1 << 40)]]


def test_compaction_orders_tensors_by_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watchstep.reading.compaction._SEGMENT_ROWS", 24)
    url = small_run(tmp_path)
    before = [info.name for info in open_run(url).index.tensors()]
    compact(url, delete_after=0)
    run = open_run(url)
    objects = [{info.collections[0] for info in located.object.catalogue} for located in run.index.objects()]
    assert objects == [{"gradients"}, {"losses"}]
    assert [info.name for info in run.index.tensors()] == before


# Bins


VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")) | st.just(float("inf")), max_size=80)


@given(VALUES, st.integers(1, 20), st.integers(1, 5))
def test_points_cover_all_rows_once(values: list[float], points: int, distance: int) -> None:
    steps = np.arange(len(values)) * distance
    binned = bin_values(steps, np.array(values), points)
    assert len(binned.step) <= max(points, min(points, len(values)))
    assert int(binned.count.sum()) == len(values)
    assert (binned.step[1:] > binned.last_step[:-1]).all()
    for position in range(len(binned.step)):
        inside = (steps >= binned.step[position]) & (steps <= binned.last_step[position])
        rows = np.array(values)[inside]
        finite = rows[np.isfinite(rows)]
        assert len(rows) == binned.count[position]
        assert len(rows) - len(finite) == binned.nonfinite[position]
        if len(finite):
            assert (binned.min[position], binned.max[position]) == (finite.min(), finite.max())
            np.testing.assert_allclose(binned.mean[position], finite.mean(), rtol=1e-9, atol=1e-6)
        else:
            assert np.isnan([binned.min[position], binned.max[position], binned.mean[position]]).all()


def test_a_worker_is_shown_alone_also_its_shards(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of(sharded_rows(range(6), 3))])
    run = open_run(tmp_path / "default" / "r")
    for worker in range(3):
        grid = check(run, GridRequest((FIRST.name,), "abs_max", 6, worker=worker))
        assert grid.count.tolist() == [[1] * 6]
        shown = run.heatmap([FIRST.name], "abs_max", 6, worker=worker)
        assert shown.values.tolist() == grid.mean.tolist()


def test_a_column_begins_where_elements_are_not_finite_first(tmp_path: Path) -> None:
    rows = [Row(step, FIRST, [1.0]) for step in range(0, 158, 10)]
    rows += [Row(step, FIRST, [NAN]) for step in range(158, 169)]
    write(new_run(tmp_path), [block_of(rows)])
    run = open_run(tmp_path / "default" / "r")
    grid = run.grid(GridRequest((FIRST.name,), "max", 500, nonfinite=True))
    first = int(np.flatnonzero(grid.nonfinite[0])[0])
    assert grid.edges[first] == 158
    assert 8 <= len(grid.edges) - 1 <= 17
