"""Where two runs diverge, and an empty result if they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.sdk.format.blocks import Row, block_of, tensor
from tests.sdk.reading.stored import FIRST, LOSS, SECOND, new_run, small_run, some_rows, write
from watchstep import Cadence, CaptureConfig, Collection, Hook, open_run
from watchstep.errors import ConfigError
from watchstep.reading.compaction import compact
from watchstep.reading.comparison.diff import diff
from watchstep.reading.comparison.tolerances import Tolerances


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
    assert (found.step, found.tensor) == (
        4,
        SECOND.name,
    )  # of gradients, the backward pass computes the last first
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


def test_the_first_tensor_is_the_first_that_a_step_computes(tmp_path: Path) -> None:
    output = tensor("second:output", "activations", order=2)
    early = tensor("first:output", "activations", order=1)
    infos = [LOSS, FIRST, SECOND, output, early, tensor("first.weight", "weights", order=1)]
    expected = ["first.weight", "first:output", "second:output", "loss", SECOND.name, FIRST.name]
    for number in range(len(expected)):
        same = expected[:number]
        for run, value in (("a", 1.0), ("b", 2.0)):
            rows = [Row(3, info, [1.0 if info.name in same else value]) for info in infos]
            write(new_run(tmp_path / str(number), run), [block_of(rows)])
        a, b = (open_run(tmp_path / str(number) / "default" / run) for run in ("a", "b"))
        assert diff(a, b).tensor == expected[number]


def test_the_default_tolerance_is_that_of_the_dtype(tmp_path: Path) -> None:
    for dtype, differs in (("float32", True), ("bfloat16", False)):
        info = replace(FIRST, dtype=dtype)
        for run, factor in (("a", 1.0), ("b", 1 + 1e-3)):
            rows = [Row(0, info, [factor, 2 * factor]), Row(0, LOSS, [factor])]
            write(new_run(tmp_path / dtype, run), [block_of(rows)])
        a, b = (open_run(tmp_path / dtype / "default" / run) for run in ("a", "b"))
        # A loss is recorded as float64, and is as exact as what computed it.
        assert (diff(a, b).step is not None) == differs
        assert diff(a, b, 0.0).tensor == "loss"
        assert diff(a, b, Tolerances.parse(["bfloat16=1e-4", "float32=1e-2"])).step == (
            0 if not differs else None
        )


def test_a_count_of_signs_may_differ_by_one_element(tmp_path: Path) -> None:
    for run, value in (("a", 1e-12), ("b", -1e-12)):
        write(new_run(tmp_path, run), [block_of([Row(0, FIRST, [1.0, value])])])
    a, b = (open_run(tmp_path / "default" / run) for run in ("a", "b"))
    assert diff(a, b).step is None
    assert "negative" in diff(a, b, 0.0).table["figure"].to_pylist()


def test_what_only_one_run_has_is_counted(tmp_path: Path) -> None:
    write(
        new_run(tmp_path, "a"),
        [block_of([Row(step, info, [1.0]) for step in range(4) for info in (LOSS, FIRST)])],
    )
    rows = [Row(0, FIRST, [1.0]), *(Row(step, LOSS, [1.0]) for step in (0, 1, 9))]
    write(new_run(tmp_path, "b"), [block_of(rows)])
    found = diff(open_run(tmp_path / "default" / "a"), open_run(tmp_path / "default" / "b"))
    assert (found.step, found.compared) == (None, 3)
    assert (found.steps_only_a, found.steps_only_b) == ([2, 3], [9])
    assert (found.rows_only_a, found.rows_only_b) == (1, 0)


def test_attempts_and_repeated_steps_are_noted(tmp_path: Path) -> None:
    small_run(tmp_path, "a")
    store = new_run(tmp_path, "b")
    write(store, [block_of(some_rows(range(6)))], attempt="a1")
    write(store, [block_of(some_rows(range(4, 12)))], attempt="a2")
    found = diff(open_run(tmp_path / "default" / "a"), open_run(tmp_path / "default" / "b"))
    assert found.step is None
    assert found.notes == (
        "run B has 2 attempts (a1 from step 0, a2 from step 4): of a repeated step the newest attempt is compared",
    )


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that save an array at each step; an element of step 2 is exchanged with another one, which no figure shows."""
    folder = tmp_path_factory.mktemp("saving")
    config = CaptureConfig(
        collections={"custom": Collection(Cadence(), tensors=Cadence())}, overhead_budget=None, system=None
    )
    for run, step_of_swap in (("a", -1), ("b", 2)):
        with Hook(folder, run=run, config=config) as hook:
            for step in range(4):
                values = np.arange(12, dtype=np.float32).reshape(3, 4)
                if step == step_of_swap:
                    values[1, 2], values[2, 0] = values[2, 0], values[1, 2]
                hook.record(values=values)
                hook.step()
    return folder / "default"


def test_full_tensors_are_compared_where_both_runs_saved_them(saving: Path) -> None:
    found = diff(open_run(saving / "a"), open_run(saving / "b"))
    assert (found.step, found.tensor, found.values) == (2, "values", 3)
    (row,) = found.table.to_pylist()
    assert (row["figure"], row["a"], row["b"]) == ("value[1,2]", 6.0, 8.0)
    assert diff(open_run(saving / "a"), open_run(saving / "a")).values == 4


def test_full_tensors_beyond_the_limit_are_named(saving: Path) -> None:
    found = diff(open_run(saving / "a"), open_run(saving / "b"), value_bytes=100)
    assert (found.step, found.values) == (None, 2)
    assert len(found.notes) == 2
    assert found.notes[0] == "full tensor values of step 2: not compared, the limit of bytes is exceeded"
