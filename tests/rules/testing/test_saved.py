"""Rule tests with saved tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.rules.saved import away, registered
from watchstep.errors import RuleError
from watchstep_rules.testing import file, running
from watchstep_rules.testing.file import RuleTest, RuleTestFile, SavedSeries, array_of
from watchstep_rules.testing.running import made_with_saved

DIAGONAL = [[1, 0], [0, 1]]


@pytest.fixture(autouse=True)
def _rule() -> Iterator[None]:
    with registered():
        yield


def differences(folder: Path, rules: list[dict[str, Any]], **test: Any) -> list[str]:
    """Run one test; what differs from what it expects."""
    (folder / "rules.yaml").write_text(json.dumps({"rules": rules}))
    tests = {"rule_files": ["rules.yaml"], "tests": [{"name": "one", **test}]}
    (folder / "tests.yaml").write_text(yaml.safe_dump(tests, sort_keys=False))
    (result,) = running.run_file(file.load(folder / "tests.yaml"), folder)
    found = [f"{each.rule}: {' '.join(each.got)}" for each in result.differences]
    return [*found, *([result.problem] if result.problem else [])]


def own(**fields: Any) -> dict[str, Any]:
    return away(**fields).as_data()


def test_a_tensor_rule_is_tested_without_a_run(tmp_path: Path) -> None:
    saved = [
        {"tensor": "2:output", "values": {20: DIAGONAL, 40: DIAGONAL, 60: [[9, 9], [9, 9]], 80: DIAGONAL}},
        {"tensor": "1.weight", "values": {60: 100.0}},
    ]
    rule = own(before=1)
    expect = [
        {
            "rule": "away",
            "fires_at": 60,
            "tensor": "2:output",
            "resolved_at": 80,
            "worker": 0,
            "mode": "train",
        }
    ]
    assert differences(tmp_path, [rule], saved=saved, expect=expect) == []
    assert differences(tmp_path, [rule], saved=saved, expect=[{"rule": "away", "not": True}]) == [
        "away: fires at 60, tensor 2:output, worker 0, severity warning, resolved at 80   2:output has 36, before [2.0]"
    ]


def test_modes_workers_and_collections_are_as_given(tmp_path: Path) -> None:
    saved = [
        {
            "tensor": "x",
            "values": {3: 2},
            "mode": "eval",
            "worker": 1,
            "collections": ["mine"],
            "role": "custom",
        },
        {"tensor": "2:output", "values": {5: 2}, "worker": 2},
    ]
    rules = [
        own(name="mine", tensors={"collection": "mine"}, modes=["eval"]),
        own(name="training", tensors={"collection": "mine"}),
        own(name="outputs"),
    ]
    expect = [
        {"rule": "mine", "fires_at": 3, "tensor": "x", "worker": 1, "mode": "eval"},
        {"rule": "training", "not": True, "health": "no_data"},
        {"rule": "outputs", "fires_at": 5, "worker": 2},
    ]
    assert differences(tmp_path, rules, saved=saved, expect=expect, workers=3) == []


def test_all_workers_have_what_names_none(tmp_path: Path) -> None:
    test = RuleTest.model_validate(
        {"name": "one", "workers": 3, "saved": [{"tensor": "2:output", "values": {5: 1, 7: 2}}], "expect": []}
    )
    rows, _ = made_with_saved(test)
    assert sorted(zip(rows.step.tolist(), rows.worker.tolist(), strict=True)) == [
        (step, worker) for step in (5, 7) for worker in (0, 1, 2)
    ]


def test_series_and_saved_tensors_are_one_run(tmp_path: Path) -> None:
    rules = [own(), {"rule": "non_finite_values"}]
    expect = [{"rule": "away", "fires_at": 2}, {"rule": "non_finite_values", "fires_at": 3}]
    series = [{"tensor": "loss", "values": "1x3 NaN"}]
    saved = [{"tensor": "2:output", "values": {2: 2}}]
    assert differences(tmp_path, rules, series=series, saved=saved, expect=expect) == []


def test_a_comparison_with_another_run_is_tested(tmp_path: Path) -> None:
    rule = {"rule": "similar_across_runs", "params": {"run": "good", "elementwise": True}}
    saved = [
        {
            "tensor": "fc.weight",
            "values": {100: DIAGONAL, 200: [[0, 1], [1, 0]], 300: DIAGONAL},
            "reference": {100: DIAGONAL, 200: DIAGONAL},
        }
    ]
    message = "4 of 4 elements of fc.weight are not those of run good"
    expect = [{"rule": "similar_across_runs", "fires_at": 200, "message": message, "resolved_at": "never"}]
    assert differences(tmp_path, [rule], saved=saved, expect=expect) == []


def test_many_steps_are_judged(tmp_path: Path) -> None:
    saved = [{"tensor": "2:output", "values": {step: 2.0 * (step == 199) for step in range(200)}}]
    assert differences(tmp_path, [own()], saved=saved, expect=[{"rule": "away", "fires_at": 199}]) == []


def test_a_rule_over_tensors_without_saved_tensors_has_no_data(tmp_path: Path) -> None:
    series = [{"tensor": "loss", "values": "1x3"}]
    assert differences(tmp_path, [own()], series=series, expect=[{"rule": "away", "health": "no_data"}]) == []


@pytest.mark.parametrize(
    ("values", "dtype", "array"),
    [
        (3, "float32", np.float32(3)),
        ([1, "NaN", "-Inf", float("inf")], "float16", np.array([1, np.nan, -np.inf, np.inf], np.float16)),
        ([[True], [False]], "bool", np.array([[True], [False]])),
        ([], "float32", np.empty(0, np.float32)),
        ({"shape": [2, 3]}, "uint8", np.zeros((2, 3), np.uint8)),
        ({"shape": [], "constant": float("nan")}, "float32", np.array(np.nan, np.float32)),
        ({"shape": [4, 0]}, "int64", np.empty((4, 0), np.int64)),
        ({"shape": [3], "normal": 7}, "float64", np.random.default_rng(7).standard_normal(3)),
    ],
    ids=str,
)
def test_values_are_written_as_numbers_lists_or_by_shape(values: Any, dtype: Any, array: Any) -> None:
    entry = SavedSeries.model_validate({"tensor": "x", "values": {0: values}, "dtype": dtype})
    made = array_of(entry.values[0], dtype)
    assert (made.dtype, made.shape, made.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        ({"values": {}}, "write at least one"),
        ({"values": {-1: 3}}, "greater than or equal to 0"),
        ({"values": {1: [[1], [1, 2]]}}, "is not a number, or lists of equal length"),
        ({"values": {1: "many"}}, "is not a number, NaN, Inf or -Inf"),
        ({"values": {1: [None]}}, "is not a number, NaN, Inf or -Inf"),
        ({"values": {1: {"shape": [2000, 2000]}}}, "at most 1000000 are possible"),
        ({"values": {1: {"shape": [2], "mean": 3}}}, "Extra inputs are not permitted"),
        ({"values": {1: {"constant": 3}}}, "Field required"),
        ({"values": {1: 3}, "dtype": "float8"}, "'bool'"),
        ({"values": {1: 3}, "collections": ["a/b"]}, "cannot be used"),
        ({"values": {1: 3}, "shape": [3]}, "Extra inputs are not permitted"),
    ],
    ids=str,
)
def test_what_cannot_be_saved_is_reported_with_its_line(
    tmp_path: Path, saved: dict[Any, Any], problem: str
) -> None:
    test = {"name": "one", "saved": [{"tensor": "x", **saved}], "expect": [{"rule": "away", "not": True}]}
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"tests": [test]}))
    with pytest.raises(RuleError) as caught:
        file.load(path)
    assert problem in caught.value.what
    line = int(caught.value.what.splitlines()[1].removeprefix(f"{path}:").split(":")[0])
    assert 1 <= line <= len(path.read_text().splitlines())


def test_a_recorded_run_has_no_saved_tensors_of_a_test() -> None:
    data = {"name": "one", "run": "r", "saved": [{"tensor": "x", "values": {0: 1}}], "expect": []}
    with pytest.raises(ValueError, match="give either 'series' or 'run'"):
        RuleTest.model_validate(data)


def test_the_schema_describes_saved_tensors() -> None:
    definitions = file.schema()["$defs"]
    assert definitions["RuleTest"]["properties"]["saved"]["items"] == {"$ref": "#/$defs/SavedSeries"}
    values = definitions["SavedSeries"]["properties"]["values"]["additionalProperties"]
    assert "shape" in values["anyOf"][-1]["properties"]
    assert RuleTestFile.model_validate(
        {"tests": [{"name": "a", "saved": [{"tensor": "x", "values": {"3": [1]}}], "expect": []}]}
    )
