"""The first difference of each tensor is the one that a whole comparison names, however the rows are divided among objects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from tests.sdk.reading.stored import new_run, write
from watchstep import open_run
from watchstep.reading.budget import ReadBudget
from watchstep.reading.compaction import compact
from watchstep.reading.comparison import diff as diff_module
from watchstep.reading.comparison.diff import diff, first_divergences

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
