"""Files of rule tests: passes, differences, and their report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.rules.custom.programs import LOUD
from watchstep import Hook
from watchstep.errors import RuleError
from watchstep_rules.testing import file, running
from watchstep_rules.testing.running import TestResult, run_file

RULES = """
rules:
  - rule: vanishing_gradient
    for: {steps: 5}
    severity: critical
    actions: [stop]
  - rule: non_finite_values
  - rule: all_zero
    name: loud
    tensors: {include: "none"}
"""
STARVES = """
  - name: a layer starves
    series:
      - {tensor: "fc1.weight:gradient", values: 1e-3x100 1e-9x20 1e-3x20}
      - {tensor: "fc2.weight:gradient", values: 1e-3x140}
      - {tensor: loss, values: 3*0.99x140}
    expect:
"""
FIRES = (
    "      - {rule: vanishing_gradient, fires_at: 104, tensor: 'fc1.weight:gradient', severity: critical}\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rules.yaml").write_text(RULES, encoding="utf-8")
    return tmp_path


def results(folder: Path, tests: str, head: str = "rule_files: [rules.yaml]\n") -> list[TestResult]:
    path = folder / "tests.yaml"
    path.write_text(f"{head}tests:{tests}", encoding="utf-8")
    return run_file(file.load(path), folder)


def report(folder: Path, expected: str) -> str:
    outcome = results(folder, STARVES + f"      - {{{expected}}}\n")
    return "\n".join(running.lines("tests.yaml", outcome))


@pytest.mark.parametrize(
    "expected",
    [
        "rule: vanishing_gradient",
        "rule: vanishing_gradient, fires_at: 104, resolved_at: 124",
        "rule: vanishing_gradient, fires_at: [100, 110], resolved_at: [120, 130], stops: true",
        "rule: vanishing_gradient, tensor: 'fc1.weight:gradient', worker: 0, mode: train, message: fc1",
        "rule: vanishing_gradient, not: true, tensor: 'fc2.weight:gradient'",
        "rule: non_finite_values, not: true, stops: false, health: ok",
        "rule: loud, not: true",
    ],
)
def test_what_is_as_expected_passes(folder: Path, expected: str) -> None:
    assert "  ok    a layer starves (420 rows" in report(folder, expected)


@pytest.mark.parametrize(
    ("expected", "wanted"),
    [
        ("rule: vanishing_gradient, fires_at: 105", "fires at 105"),
        ("rule: vanishing_gradient, fires_at: [1, 9]", "fires at 1 to 9"),
        ("rule: vanishing_gradient, resolved_at: never", "fires, is not resolved"),
        ("rule: vanishing_gradient, resolved_at: 9", "fires, resolved at 9"),
        ("rule: vanishing_gradient, tensor: other", "fires, tensor other"),
        ("rule: vanishing_gradient, worker: 3", "fires, worker 3"),
        ("rule: vanishing_gradient, mode: eval", "fires, mode eval"),
        ("rule: vanishing_gradient, message: nonsense", "fires, message with 'nonsense'"),
        ("rule: vanishing_gradient, severity: info", "fires, severity info"),
        ("rule: vanishing_gradient, stops: false", "fires, stops nothing"),
        ("rule: vanishing_gradient, not: true", "does not fire"),
        ("rule: vanishing_gradient, health: error", "fires, health error"),
    ],
)
def test_what_differs_is_reported_beside_what_was_expected(folder: Path, expected: str, wanted: str) -> None:
    text = report(folder, expected).splitlines()
    assert text[1].startswith("  FAIL  a layer starves")
    assert text[2:5] == [
        "        vanishing_gradient",
        f"          - expected: {wanted}",
        (
            "          + got:      fires at 104, tensor fc1.weight:gradient, worker 0, severity critical, stops the job, "
            "resolved at 124"
        ),
    ]
    assert "fc1.weight:gradient" in text[5]


def test_an_alert_that_does_not_fire_is_reported(folder: Path) -> None:
    assert "+ got:      does not fire (0 findings, severity warning)" in report(
        folder, "rule: non_finite_values"
    )
    assert "no rule config; there are loud, non_finite_values, vanishing_gradient" in report(
        folder, "rule: missing"
    )


def test_others_may_have_to_be_silent(folder: Path) -> None:
    (found,) = results(folder, STARVES + "      - {rule: loud, not: true}\n    others: silent\n")
    assert [(difference.rule, difference.expected) for difference in found.differences] == [
        ("vanishing_gradient", "is silent")
    ]


def test_the_default_rules_are_tested_where_no_file_is_named(folder: Path) -> None:
    tests = "\n  - {name: loss is lost, series: [{tensor: loss, values: 3x5 NaNx60}], expect: [{rule: nan_or_inf, fires_at: 54, stops: true}]}"
    (found,) = results(folder, tests, head="")
    assert found.passed


def test_a_rule_that_fails_is_reported(folder: Path) -> None:
    (folder / "rules.yaml").write_text(
        'rules: [{rule: sql, name: bad, params: {query: "SELECT (tensor::INTEGER)::VARCHAR AS tensor FROM statistics"}}]',
        encoding="utf-8",
    )
    tests = "\n  - {name: bad, series: [{tensor: loss, values: 3}], expect: [{rule: bad, not: true}]}"
    (found,) = results(folder, tests)
    assert "health error: 1 step was not judged; last error: SQL at step 0" in found.differences[0].got[1]
    (found,) = results(folder, tests.replace("not: true", "health: error"))
    assert found.passed


def test_a_rule_that_fails_unexpectedly_fails_the_test_that_does_not_name_it(folder: Path) -> None:
    query = "SELECT tensor FROM statistics WHERE tensor::INTEGER > 0"
    (folder / "rules.yaml").write_text(
        f'rules: [{{rule: non_finite_values}}, {{rule: sql, name: bad, params: {{query: "{query}"}}}}]',
        encoding="utf-8",
    )
    tests = "\n  - {name: a, series: [{tensor: loss, values: 3}], expect: [{rule: non_finite_values, not: true}%s]}"
    (found,) = results(folder, tests % "")
    (difference,) = found.differences
    assert (difference.rule, difference.expected) == ("bad", "can be evaluated")
    assert "health error" in difference.got[1]
    (found,) = results(folder, tests % ", {rule: bad, health: error}")
    assert found.passed


def test_python_rules_are_tested_as_well(folder: Path) -> None:
    (folder / "mine.py").write_text(LOUD, encoding="utf-8")
    (folder / "rules.yaml").write_text(
        "rules: [{rule: python, name: mine, params: {file: mine.py, class: Loud, params: {over: 1, threshold: 1.0}}}]",
        encoding="utf-8",
    )
    tests = "\n  - {name: loud, series: [{tensor: 'a.weight:gradient', values: 1x5 4x2}], expect: [{rule: mine, fires_at: 5}]}"
    (found,) = results(folder, tests)
    assert found.passed, found


@pytest.mark.ci
def test_a_recorded_run_is_judged_as_well(folder: Path) -> None:
    with Hook(folder / "store", run="night", project="vision") as hook:
        for step in range(12):
            hook.log(loss=math.nan if step >= 7 else 3.0 - step / 10)
            hook.step()
    tests = """
  - name: last night
    run: store/vision/night
    expect:
      - {rule: non_finite_values, fires_at: 7, tensor: loss, resolved_at: never}
      - {rule: loud, health: no_data}
"""
    (found,) = results(folder, tests)
    assert found.passed, found
    assert found.rows == 12
    (found,) = results(folder, tests.replace("expect:", "attempt: other\n    expect:"))
    assert "has no attempt 'other'" in found.problem
    (found,) = results(folder, tests.replace("vision/night", "vision/day"))
    assert "not found" in found.problem


def test_a_series_that_cannot_be_is_a_problem_of_its_test_alone(folder: Path) -> None:
    tests = """
  - {name: bad, series: [{tensor: loss, figure: std, values: 3}], expect: []}
  - {name: good, series: [{tensor: loss, values: 3}], expect: []}
"""
    bad, good = results(folder, tests)
    assert "series 'loss': std 3 is not possible" in bad.problem
    assert good.passed
    assert running.summary({"tests.yaml": [bad, good]}) == "2 tests, 1 failed"
    assert running.summary({"tests.yaml": [good]}) == "1 test, all passed"


def test_junit(folder: Path) -> None:
    tests = (
        STARVES
        + FIRES
        + """
  - {name: "loss\\u0001", series: [{tensor: loss, values: 3}], expect: [{rule: non_finite_values}]}
  - {name: bad, series: [{tensor: loss, figure: std, values: 3}], expect: []}
"""
    )
    root = ET.fromstring(running.junit_xml({"tests.yaml": results(folder, tests)}))
    (suite,) = root
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "1")
    passed, failed, broken = suite
    assert (passed.get("name"), len(passed)) == ("a layer starves", 0)
    assert failed.get("name") == "loss?"
    assert "does not fire" in (failed[0].text or "")
    assert "is not possible" in (broken[0].get("message") or "")


def case(test: str) -> str:
    return f"tests: [{{name: x, {test}}}]"


BAD = {
    "tests: []": "tests",
    "tests: [{name: x}]": "tests.0.expect",
    case("expect: []"): "either 'series' or 'run'",
    case("expect: [], run: a, series: [{tensor: a, values: 1}]"): "either 'series' or 'run'",
    case("expect: [], attempt: a, series: [{tensor: a, values: 1}]"): "'attempt'",
    case("expect: [], series: [{tensor: a, values: 1y}]"): "'1y' is not a valid value",
    case("expect: [], series: [{tensor: a, values: 1, figure: beauty}]"): "figure 'beauty'",
    case("expect: [], series: [{tensor: a, values: 1x5, probes: {x: 1x3}}]"): "probe 'x' has 3 values",
    case("expect: [], series: [{tensor: a, values: 1, shape: [0]}]"): "shape",
    case("expect: [], series: [{tensor: a, values: 1, color: red}]"): "color",
    case("expect: [{rule: a, not: true, fires_at: 1}], run: a"): "contradict",
    case("expect: [{rule: a, fires_at: -1}], run: a"): "fires_at",
    "a: [": "not valid YAML",
    "[" * 3000: "not valid YAML",
    "": "file",
}


@pytest.mark.parametrize(("text", "names"), BAD.items(), ids=lambda text: text[:50])
def test_a_file_that_is_not_valid_is_refused(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "tests.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RuleError) as caught:
        file.load(path)
    assert names in caught.value.what


def test_each_fault_is_reported_in_a_line_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "tests.yaml"
    path.write_text(
        "tests:\n  - name: a\n    run: x\n    expect:\n      - {rule: a, fire_at: 1}\n    colour: red\n    name: b\n",
        encoding="utf-8",
    )
    with pytest.raises(RuleError) as caught:
        file.load(path)
    head, *lines = caught.value.what.splitlines()
    assert head == f"rule tests {path}: 3 errors"
    assert lines == [
        f"{path}:5: error: tests.0.expect.0.fire_at: Extra inputs are not permitted",
        f"{path}:6: error: tests.0.colour: Extra inputs are not permitted",
        f"{path}:7: error: duplicate key name: only the last one would count",
    ]
    path.write_text("tests: []", encoding="utf-8")
    with pytest.raises(RuleError, match=r"tests\.yaml:1: error: tests: the list is empty"):
        file.load(path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="cannot be read"):
        file.load(tmp_path / "tests.yaml")


def test_two_configs_of_one_name_in_several_rule_files_are_refused(folder: Path) -> None:
    with pytest.raises(RuleError, match="two rule configs are named 'vanishing_gradient'"):
        results(folder, STARVES + FIRES, head="rule_files: [rules.yaml, rules.yaml]\n")


def test_the_schema_takes_what_is_taken_and_refuses_what_has_another_form() -> None:
    schema = json.loads(json.dumps(file.schema()))
    Draft202012Validator.check_schema(schema)
    check = Draft202012Validator(schema)
    assert check.is_valid(yaml.safe_load(f"rule_files: [rules.yaml]\ntests:{STARVES}{FIRES}"))
    for text in ("tests: []", "tests: [{name: x}]", case("expect: [{rule: a, fires_at: -1}], run: a")):
        assert not check.is_valid(yaml.safe_load(text))
