"""SQL over a run: the figures of the other readers, minimal fetches, and no access to anything else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.sdk.format.blocks import Row, block_of
from tests.sdk.reading.stored import FIRST, LOSS, new_run, small_run, write
from watchstep import open_run
from watchstep.errors import ConfigError
from watchstep.format.statistics import DERIVED
from watchstep.store.store import Store


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
