"""Comparisons of runs: differences, first divergences and tolerances."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from tests.sdk.reading.stored import FIRST, LOSS, SECOND, new_run, small_run, some_rows, write
from watchstep import Cadence, CaptureConfig, Collection, Hook, open_run
from watchstep.errors import ConfigError
from watchstep.reading.budget import ReadBudget
from watchstep.reading.compaction import compact
from watchstep.reading.comparison import diff as diff_module
from watchstep.reading.comparison.diff import diff, first_divergences
from watchstep.reading.comparison.settings import differing_settings
from watchstep.reading.comparison.tolerances import (
    DEFAULT_UNITS,
    UNIT_ROUNDOFF,
    Tolerances,
    differing_element,
)

# Differences


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


def test_rows_of_other_numbers_of_elements_are_named_and_not_compared(tmp_path: Path) -> None:
    for run, batches in (("a", 1), ("b", 2)):
        output = tensor("layer:output", "activations", role="output")
        rows = [Row(step, output, [1.0, 2.0] * batches) for step in range(3)]
        rows += [Row(step, FIRST, [1.0 if step < 2 else float(batches)]) for step in range(3)]
        write(new_run(tmp_path, run), [block_of(rows)])
    a, b = (open_run(tmp_path / "default" / run) for run in "ab")
    for found in (diff(a, b), first_divergences(a, b)):
        (note,) = found.notes
        assert "3 rows of 1 tensors were measured on different numbers of elements" in note
        assert "layer:output at step 0: 2 elements in the first run, 4 in the second" in note
    whole = diff(a, b)
    assert (whole.step, whole.tensor, whole.compared) == (2, FIRST.name, 3)
    assert [entry.tensor for entry in first_divergences(a, b).tensors] == [FIRST.name]


def test_a_cosine_is_compared_where_it_relates_to_the_same_gradient(tmp_path: Path) -> None:
    for run, steps, cosines in (("a", (0, 1, 2, 4), (0.1, 0.1, 0.5, 0.5)), ("b", (0, 2, 4), (0.1, 0.9, 0.6))):
        rows = [Row(step, FIRST, [1.0]) for step in steps]
        block = replace(block_of(rows), probes={"gradient_cosine": np.array(cosines)})
        write(new_run(tmp_path, run), [block])
    found = diff(open_run(tmp_path / "default" / "a"), open_run(tmp_path / "default" / "b"))
    assert [(row["step"], row["figure"]) for row in found.table.to_pylist()] == [(4, "probe.gradient_cosine")]


def test_a_hyperparameter_differs_from_the_step_at_which_it_changes(tmp_path: Path) -> None:
    rate, decay = (
        tensor(f"optimizer:{name}/0", "metrics", role="metric", shape=())
        for name in ("learning_rate", "weight_decay")
    )
    for run, later in (("a", 0.001), ("b", 0.1)):
        rows = [Row(0, rate, [0.001]), Row(30, rate, [later]), Row(0, decay, [0.5])]
        rows += [Row(step, LOSS, [1.0]) for step in range(60)]
        write(new_run(tmp_path, run), [block_of(sorted(rows, key=lambda row: row.step))])
    runs = [open_run(tmp_path / "default" / run) for run in "ab"]
    found = differing_settings(runs)
    (setting,) = found.differing
    assert setting.as_line("ab") == "optimizer:learning_rate/0: 0.001 in a, 0.1 in b, from step 30 on"
    assert found.compared["hyperparameter"] == 2
    assert differing_settings(runs, (0, 29)).differing == []
    assert [entry.source for entry in differing_settings([*runs, runs[0]]).differing] == ["hyperparameter"]


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


# First divergences


INFOS = (
    tensor("loss", "losses", role="loss", shape=()),
    *(gradient(f"layer{number}", order=number) for number in range(6)),
)


def recorded(folder: Path, name: str, begins: dict[str, int], steps: int = 60) -> Path:
    """A run of three segments whose tensors differ from those of others from a step on."""
    path = new_run(folder, name)
    values = np.random.default_rng(7).normal(size=(steps, len(INFOS), 2))
    rows = [
        Row(step, info, (values[step, place] + 10 * (step >= begins.get(info.name, steps))).tolist())
        for step in range(steps)
        for place, info in enumerate(INFOS)
    ]
    third = len(rows) // 3
    write(path, [block_of(rows[part * third : (part + 1) * third]) for part in range(3)])
    return folder / "default" / name


def names(begins: dict[str, int]) -> dict[str, int]:
    return {info.name: step for info in INFOS for name, step in begins.items() if info.name.startswith(name)}


@pytest.mark.parametrize("rows", [1, 50, 10_000])
@pytest.mark.parametrize("begins", [{}, {"loss": 0}, {"layer3": 17, "layer1": 17, "loss": 45, "layer5": 59}])
def test_they_are_those_of_a_whole_comparison(
    tmp_path: Path, rows: int, begins: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff_module, "_PART_ROWS", rows)
    a, b = recorded(tmp_path, "a", {}), recorded(tmp_path, "b", names(begins))
    whole = diff(open_run(a), open_run(b)).table.to_pylist()
    expected: dict[str, int] = {}
    for row in whole:
        expected.setdefault(row["tensor"], row["step"])
    assert expected == names(begins)
    for compacted in (False, True):
        if compacted:
            for path in (a, b):
                compact(path, delete_after=0)
        found = first_divergences(open_run(a), open_run(b))
        assert [(entry.tensor, entry.step) for entry in found.tensors] == list(expected.items())
        assert (found.first, found.last, found.left_out) == (0, 59, 0)


def test_objects_of_a_few_tensors_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = recorded(tmp_path, "a", {}), recorded(tmp_path, "b", names({"layer4": 30}))
    monkeypatch.setattr(diff_module, "_has_objects_of_few_tensors", lambda _: True)
    for rows in (1, 200, 10_000):
        monkeypatch.setattr(diff_module, "_PART_ROWS", rows)
        found = first_divergences(open_run(a), open_run(b))
        assert [entry.step for entry in found.tensors] == [30]
        assert found.rows == 60 * len(INFOS)


def test_a_range_of_steps(tmp_path: Path) -> None:
    a, b = recorded(tmp_path, "a", {}), recorded(tmp_path, "b", names({"layer2": 20}))
    found = first_divergences(open_run(a), open_run(b), steps=(0, 19))
    assert (found.tensors, found.last) == ([], 19)
    found = first_divergences(open_run(a), open_run(b), steps=(25, 1000))
    assert [entry.step for entry in found.tensors] == [25]
    assert first_divergences(open_run(a), open_run(b), steps=(100, 200)).last == -1


def test_no_part_is_read_once_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = recorded(tmp_path, "a", {}), recorded(tmp_path, "b", names({"layer2": 20}))
    found = first_divergences(open_run(a), open_run(b), seconds=0)
    assert (found.tensors, found.last, found.rows) == ([], -1, 0)
    monkeypatch.setattr(diff_module, "_has_objects_of_few_tensors", lambda _: True)
    assert first_divergences(open_run(a), open_run(b), seconds=0).left_out == len(INFOS)


def test_parts_are_released_from_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_module, "_PART_ROWS", 20)
    paths = recorded(tmp_path, "a", {}), recorded(tmp_path, "b", names({"layer2": 50}))
    a, b = (open_run(path) for path in paths)
    budget = ReadBudget(60, 0.02)  # less than half of the rows of a run
    for run in (a, b):
        run.index.budget = budget
    assert [entry.step for entry in first_divergences(a, b).tensors] == [50]
    budget.keep(int(0.0199 * 2**20))


def test_no_common_tensor(tmp_path: Path) -> None:
    for name, info in (("a", INFOS[0]), ("b", INFOS[1])):
        write(new_run(tmp_path, name), [block_of([Row(0, info, [1.0])])])
    found = first_divergences(open_run(tmp_path / "default" / "a"), open_run(tmp_path / "default" / "b"))
    assert (found.tensors, found.only_a, found.only_b) == ([], ["loss"], [INFOS[1].name])


# Tolerances


def test_the_defaults_are_multiples_of_the_unit_roundoff() -> None:
    assert Tolerances().of("float32") == 256 * 2.0**-24
    assert Tolerances().of("bfloat16") == 16 * 2.0**-8
    assert Tolerances().of("int64") == 0
    assert DEFAULT_UNITS.keys() == UNIT_ROUNDOFF.keys()
    assert all(Tolerances().of(name) <= 0.5 for name in UNIT_ROUNDOFF)
    for name in ("float16", "float32", "float64"):
        assert UNIT_ROUNDOFF[name] == np.finfo(name).eps / 2


def test_words_change_one_dtype_or_all() -> None:
    chosen = Tolerances.parse(["float32=1e-3", "bfloat16=0"])
    assert (chosen.of("float32"), chosen.of("bfloat16")) == (1e-3, 0)
    assert chosen.of("float64") == Tolerances().of("float64")
    assert Tolerances.parse(["1e-3"]) == Tolerances.uniform(1e-3)
    assert Tolerances.parse(["0"]).is_exact
    assert not Tolerances().is_exact
    assert Tolerances().largest(["float32", "bfloat16", "int8"]) == Tolerances().of("bfloat16")


@pytest.mark.parametrize("word", ["x", "float32=", "float99=1", "-1", "nan", "float32=-0.1"])
def test_an_invalid_word(word: str) -> None:
    with pytest.raises(ConfigError, match="tolerance"):
        Tolerances.parse([word])


def test_the_element_that_differs_most_is_named() -> None:
    a = np.ones((2, 3), np.float32)
    b = a.copy()
    b[1, 2], b[0, 1] = 1.5, 1.1
    found = differing_element(a, b, 1e-3)
    assert found is not None
    assert (found.index, found.a, found.b, found.elements) == ((1, 2), 1.0, 1.5, 2)
    assert differing_element(a, b, 0.5) is None


def test_an_element_that_cancels_is_compared_with_the_others() -> None:
    a, b = np.array([1.0, 1e-9]), np.array([1.0, 2e-9])
    assert differing_element(a, b, 1e-6) is None
    assert differing_element(a, b, 0.0) is not None


def test_nan_infinity_and_complex_numbers() -> None:
    a = np.array([math.nan, math.inf, 1.0])
    assert differing_element(a, a, 0.0) is None
    found = differing_element(a, np.array([math.nan, -math.inf, 1.0]), 1.0)
    assert found is not None
    assert found.index == (1,)
    found = differing_element(np.array([1 + 2j]), np.array([1 + 3j]), 0.0)
    assert found is not None
    assert (found.index, found.a, found.b) == ((0, 1), 2.0, 3.0)


_ARRAYS = arrays.arrays(np.float32, 5, elements=st.floats(width=32))


@given(_ARRAYS, _ARRAYS, st.floats(0, 1))
def test_a_comparison_is_symmetric_and_a_larger_tolerance_finds_less(
    a: np.ndarray[tuple[int], np.dtype[np.float32]],
    b: np.ndarray[tuple[int], np.dtype[np.float32]],
    tolerance: float,
) -> None:
    found, mirrored = differing_element(a, b, tolerance), differing_element(b, a, tolerance)
    assert (found is None) == (mirrored is None)
    assert differing_element(a, a, tolerance) is None
    if found is not None:
        exact = differing_element(a, b, 0.0)
        assert exact is not None
        assert exact.elements >= found.elements
