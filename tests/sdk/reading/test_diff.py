"""Where two runs diverge, and an empty result if they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sdk.format.blocks import Row, block_of
from tests.sdk.reading.stored import FIRST, LOSS, SECOND, new_run, small_run, write
from watchstep import open_run
from watchstep.errors import ConfigError
from watchstep.reading.compaction import compact
from watchstep.reading.diff import diff


def test_equal_runs_do_not_differ_compacted_or_not(tmp_path: Path) -> None:
    a, b = small_run(tmp_path, "a", workers=2), small_run(tmp_path, "b", workers=2)
    compact(a, delete_after=0)
    found = diff(open_run(a), open_run(b))
    assert (found.step, found.tensor, found.table.num_rows, found.compared) == (None, None, 0, 72)


@pytest.mark.parametrize(("tolerance", "differs"), [(0.0, True), (1e-6, True), (1e-2, False)])
def test_a_tolerance(tmp_path: Path, tolerance: float, differs: bool) -> None:
    a, b = small_run(tmp_path, "a"), small_run(tmp_path, "b", factor=1 + 1e-4)
    assert (diff(open_run(a), open_run(b), tolerance).step is not None) == differs


def test_the_first_step_and_tensor(tmp_path: Path) -> None:
    for run, bad in (("a", 1.0), ("b", float("nan"))):
        rows = [Row(step, info, [1.0, 2.0]) for step in range(4) for info in (SECOND, LOSS, FIRST)]
        rows += [Row(4, SECOND, [bad]), Row(4, FIRST, [bad]), Row(5, LOSS, [3.0 * bad])]
        write(new_run(tmp_path, run), [block_of(rows)])
    found = diff(open_run(tmp_path / "default" / "a"), open_run(tmp_path / "default" / "b"))
    assert (found.step, found.tensor) == (4, FIRST.name)
    (row,) = [row for row in found.table.to_pylist() if row["step"] == 5 and row["figure"] == "mean"]
    assert (row["tensor"], row["a"], row["b"], row["relative"]) == ("loss", 3.0, None, None)


def test_tensors_of_one_run_alone(tmp_path: Path) -> None:
    write(new_run(tmp_path, "a"), [block_of([Row(0, LOSS, [1.0])])])
    write(new_run(tmp_path, "b"), [block_of([Row(0, FIRST, [1.0])])])
    found = diff(open_run(tmp_path / "default" / "a"), open_run(tmp_path / "default" / "b"))
    assert (found.only_a, found.only_b, found.compared) == (["loss"], [FIRST.name], 0)


def test_a_tolerance_below_zero(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path))
    with pytest.raises(ConfigError, match="tolerance"):
        diff(run, run, -1.0)
