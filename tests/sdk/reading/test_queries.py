"""Queries over a run's rows, and SQL."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from tests.sdk.format.blocks import Row, block_of, blocks, statistics_of
from tests.sdk.reading.stored import FIRST, LOSS, SECOND, new_run, sharded_rows, small_run, write
from watchstep import open_run
from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.block import Block
from watchstep.format.statistics import DERIVED
from watchstep.format.tensors import Placement
from watchstep.reading.columns import COUNTED
from watchstep.reading.queries import edges_between
from watchstep.store.store import Store

# Queries


@pytest.mark.parametrize("figure", [*DERIVED, *COUNTED])
def test_a_series_is_a_column_of_the_tensor(tmp_path: Path, figure: str) -> None:
    run = open_run(small_run(tmp_path, workers=2))
    due = run.tensor(FIRST.name).statistics()
    found = run.series(FIRST.name, figure)
    assert found["step"].to_pylist() == due["step"].to_pylist()
    assert found[figure].to_pylist() == due[figure].to_pylist()
    assert run.series(FIRST.name, figure, worker=1)["worker"].to_pylist() == [1] * 12
    assert run.series(FIRST.name, figure, mode="eval").num_rows == 0


@pytest.mark.ci
@settings(max_examples=25, deadline=None)
@given(blocks)
def test_figures_of_any_run_are_those_of_its_rows(block: Block) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(new_run(Path(folder)), [block.where(block.step % 2 == 0), block.where(block.step % 2 == 1)])
        run = open_run(Path(folder) / "default" / "r")
        for info in {block.info(row) for row in range(len(block))}:
            found = run.series(info.name, "mean", merge=False)
            chosen = np.array([block.info(row) == info for row in range(len(block))])
            due = sorted(_plain(value) for value in block.where(chosen).statistics.mean)
            assert sorted(map(_plain, found["mean"].to_pylist())) == due


def _plain(value: float | None) -> float:
    return -math.inf if value is None or math.isnan(value) else float(value)


@pytest.mark.parametrize("figure", ["std", "mean", "l2", "min", "count", "abs_max"])
def test_shards_merge_into_the_whole(tmp_path: Path, figure: str) -> None:
    write(new_run(tmp_path), [block_of(sharded_rows(range(6), 4))])
    run = open_run(tmp_path / "default" / "r")
    merged = run.series(FIRST.name, figure)
    for step in range(6):
        whole = statistics_of([[v for shard in range(4) for v in (step + shard, -1.0, 2.0**shard)]])
        due = DERIVED[figure](whole) if figure in DERIVED else getattr(whole, figure)
        assert merged[figure][step].as_py() == pytest.approx(float(due[0]), rel=1e-12)
    assert run.series(FIRST.name, figure, merge=False).num_rows == 24
    assert run.series(FIRST.name, figure, worker=2).num_rows == 6
    heat = run.heatmap([FIRST.name], figure)
    assert heat.values[0].tolist() == merged[figure].to_pylist()
    assert int(run.histogram(FIRST.name, 2).counts.sum() + run.histogram(FIRST.name, 2).zeros.sum()) == 72


def test_replicas_stay_apart(tmp_path: Path) -> None:
    rows = [
        Row(0, FIRST, [1.0 + replica], worker=2 * replica + shard, place=Placement(shard, 2, replica))
        for replica in range(2)
        for shard in range(2)
    ]
    write(new_run(tmp_path), [block_of(rows)])
    found = open_run(tmp_path / "default" / "r").series(FIRST.name, "mean")
    assert found.select(["worker", "replica", "mean"]).to_pylist() == [
        {"worker": 0, "replica": 0, "mean": 1.0},
        {"worker": 2, "replica": 1, "mean": 2.0},
    ]


def test_probes_do_not_merge(tmp_path: Path) -> None:
    rows = [
        Row(0, FIRST, [1.0], worker=w, place=Placement(w, 2), probes={"cosine": float(w)}) for w in range(2)
    ]
    write(new_run(tmp_path), [block_of(rows)])
    run = open_run(tmp_path / "default" / "r")
    merged = run.at_step(["cosine", "max", "time_ns"])
    assert merged.select(["cosine", "max", "time_ns"]).to_pylist() == [
        {"cosine": None, "max": 1.0, "time_ns": 0.0}
    ]
    assert run.series(FIRST.name, "cosine", merge=False)["cosine"].to_pylist() == [0.0, 1.0]


@pytest.mark.parametrize("reduce", ["mean", "min", "max"])
@pytest.mark.parametrize("bins", [1, 5, 12, 100])
def test_a_heatmap_has_no_more_bins_than_requested(tmp_path: Path, bins: int, reduce: str) -> None:
    run = open_run(small_run(tmp_path))
    heat = run.heatmap("gradients", "max", bins, reduce=reduce)  # type: ignore[arg-type]
    assert heat.tensors == [FIRST.name, SECOND.name]
    assert heat.values.shape == (2, min(bins, 12)) == (2, len(heat.edges) - 1)
    how = {"mean": np.mean, "min": np.min, "max": np.max}[reduce]
    for place, (first, last) in enumerate(zip(heat.edges[:-1], heat.edges[1:], strict=True)):
        assert heat.values[0, place] == pytest.approx(how(np.arange(first, last) + 1.0))  # type: ignore[operator]
    assert np.isnan(run.heatmap([FIRST.name], "max", mode="eval").values).all()


def test_histograms_over_the_steps(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path, workers=2))
    found = run.histogram(SECOND.name, steps=3)
    assert found.edges.tolist() == [0, 4, 8, 12]
    assert found.zeros.tolist() == [4, 4, 4]
    assert (found.lower[1:] >= found.upper[:-1]).all()
    spread = dict(zip(found.lower.tolist(), found.counts.T.tolist(), strict=True))
    assert spread == {-4.0: [4, 4, 4], 1.0: [1, 0, 0], 2.0: [2, 0, 0], 4.0: [1, 3, 0], 8.0: [0, 1, 4]}
    assert run.histogram(SECOND.name, 1, worker=1).counts.sum() == 24


def test_one_step(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path))
    assert run.at_step(["max", "rms"])["step"].to_pylist() == [11] * 3
    assert run.at_step(["max"], step=3)["max"].to_pylist() == [4.0] * 3
    assert run.at_step(["max"], mode="train")["tensor"].to_pylist() == [LOSS.name, FIRST.name, SECOND.name]
    assert run.at_step(["max"], step=99).num_rows == 0


def test_what_is_not_there_is_reported(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path))
    with pytest.raises(ConfigError, match="figure 'nope'"):
        run.series(FIRST.name, "nope")
    with pytest.raises(NotFoundError, match="'nope'"):
        run.series("nope", "mean")
    with pytest.raises(ConfigError, match="collection 'nope'"):
        run.heatmap("nope", "mean")
    with pytest.raises(ConfigError, match="bins 0"):
        run.heatmap("gradients", "mean", 0)
    with pytest.raises(NotFoundError, match="no row"):
        run.histogram(FIRST.name, mode="eval")


@pytest.mark.parametrize(("last", "bins"), [(10**14, 2000), (2**56, 200), (10**18 - 1, 2000), (2, 200)])
def test_bins_of_any_range_of_steps_ascend(last: int, bins: int) -> None:
    edges = edges_between(0, last, bins)
    assert len(edges) - 1 == min(bins, last + 1)
    assert (edges[0], edges[-1]) == (0, last + 1)
    assert (np.diff(edges) > 0).all()


def test_pictures_of_steps_far_apart(tmp_path: Path) -> None:
    far = 2**56
    block = block_of([Row(step, FIRST, [1.0]) for step in (0, 1)])
    write(new_run(tmp_path), [replace(block, step=np.array([0, far]))])
    run = open_run(tmp_path / "default" / "r")
    assert run.heatmap([FIRST.name], "mean", 200).edges[-1] == far + 1
    histogram = run.histogram(FIRST.name, 200)
    assert (histogram.counts.sum(), histogram.edges[-1]) == (2, far + 1)


# SQL


def test_statistics_are_those_of_the_tensor(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path, workers=2))
    due = run.tensor(FIRST.name).statistics()
    names = ", ".join(f'"{name}"' for name in due.column_names if not name.startswith("histogram"))
    found = run.sql(f"SELECT {names} FROM statistics WHERE tensor = '{FIRST.name}' ORDER BY step, worker")
    for name in found.column_names:
        assert found[name].to_pylist() == due[name].to_pylist(), name
    assert set(DERIVED) < set(found.column_names)


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("SELECT count(*) FROM statistics", [36]),
        ("SELECT 1 FROM statistics LIMIT 1", [1]),
        ("SELECT max(step) FROM statistics WHERE step < 5 AND tensor IN ('loss', 'none')", [4]),
        ("SELECT step FROM statistics WHERE tensor LIKE 'first%' AND max > 11.5", [11]),
        ("SELECT count(*) FROM (FROM statistics)", [36]),
        ("SELECT sum(a.count) FROM statistics a JOIN statistics b USING (step) WHERE b.tensor = 'loss'", [108]),
        ("SELECT mode FROM statistics GROUP BY mode", ["train"]),
        ("SELECT name FROM tensors WHERE 'gradients' = ANY(collections) ORDER BY \"order\" DESC LIMIT 1",
         ["second.weight:gradient"]),
        ("SELECT value FROM losses WHERE step = 2", [1.0]),
        ("SELECT s.step FROM statistics s JOIN tensors t ON s.tensor = t.name WHERE t.role = 'loss' AND s.max > 11",
         [11]),
    ],
)  # fmt: skip
def test_queries(tmp_path: Path, text: str, due: list[object]) -> None:
    (column,) = open_run(small_run(tmp_path)).sql(text).columns
    assert column.to_pylist() == due


def test_probes_are_columns(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of([Row(0, FIRST, [1.0], probes={"cosine": 0.5})]), block_of([Row(1, FIRST, [1.0])])])
    found = open_run(tmp_path / "default" / "r").sql('SELECT "probe.cosine" FROM statistics ORDER BY step')
    assert found.columns[0].to_pylist() == [0.5, None]


def test_a_tensor_that_is_all_nan_has_no_norm_wherever_it_is_read(tmp_path: Path) -> None:
    bad = [[3.0, 4.0], [float("nan")] * 2, [float("inf")], [float("nan"), 2.0], [0.0]]
    write(new_run(tmp_path), [block_of([Row(step, FIRST, values) for step, values in enumerate(bad)])])
    run, norms = open_run(tmp_path / "default" / "r"), {"l2": [5.0, None, None, 2.0, 0.0]}
    norms["l1"] = [7.0, None, None, 2.0, 0.0]
    table = run.tensor(FIRST.name).statistics()
    for name, due in norms.items():
        assert table[name].to_pylist() == due
        assert run.series(FIRST.name, name)[name].to_pylist() == due
        found = run.sql(f"SELECT {name} FROM statistics ORDER BY step")
        assert found[name].to_pylist() == due
    assert np.isnan(run.heatmap("gradients", "l2", bins=5).values[0]).tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_only_what_a_query_needs_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_run(tmp_path)
    rows = [Row(step, LOSS, [step, 0.5]) for step in range(60_000)]
    write(store, [block_of(rows)])
    run = open_run(tmp_path / "default" / "r")
    fetched: list[int] = []
    whole: Callable[..., list[memoryview]] = Store.get_ranges

    def counted(self: Store, key: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
        fetched.extend(length for _, length in ranges)
        return whole(self, key, ranges)

    monkeypatch.setattr(Store, "get_ranges", counted)
    size = sum(entry.size for entry in store.entries("stats/"))
    run.sql("SELECT max(step) FROM statistics")
    assert 0 < sum(fetched) < size / 2
    fetched.clear()
    assert run.sql("SELECT name FROM tensors").num_rows == 1
    assert fetched == []


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM read_csv('/etc/passwd')",
        "COPY (SELECT 1) TO '/tmp/out.csv'",
        "ATTACH '/tmp/other.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "SELECT * FROM text",
        "SELECT nope FROM statistics",
        "SELEC 1",
        "",
    ],
)
def test_what_is_refused_is_reported(tmp_path: Path, text: str) -> None:
    run = open_run(small_run(tmp_path))
    with pytest.raises(ConfigError, match="SQL") as caught:
        run.sql(text)
    assert "hint:" in str(caught.value)


def test_without_duckdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(small_run(tmp_path))
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ConfigError, match="watchstep\\[sql\\]"):
        run.sql("SELECT 1")
