from __future__ import annotations

import json
from pathlib import Path

import pytest

from watchstep.errors import RuleError
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule_files.checks import CheckResult, check_config_text, check_text


def checked(text: str) -> CheckResult:
    return check_text(text, "rules.yaml", Path())


def lines(text: str) -> list[tuple[int, str, str]]:
    return [(remark.line, remark.level, remark.place) for remark in checked(text).remarks]


BAD = """
rules:
  - rule: exploding_gradient
    params:
      growth: 0.5
      groth: 3
    severity: fatal
    severity: info
    for: {steps: 0}
  - rule: overfit
  - rule: overfit
    actions: [explode]
  - &wrong {rule: nan}
  - *wrong
"""


def test_every_error_has_its_line_and_place() -> None:
    assert lines(BAD) == [
        (5, "error", "rules.0.params.growth"),
        (6, "error", "rules.0.params.groth"),
        (8, "error", "severity"),
        (9, "error", "rules.0.for.steps"),
        (11, "error", "rules.2"),
        (12, "error", "rules.2.actions.0"),
        (13, "error", "rules.3.rule"),
        (13, "error", "rules.4.rule"),
        (13, "error", "rules.4"),
    ]
    assert not checked(BAD).ok
    assert checked(BAD).configs == ()


def test_a_valid_file_lists_its_rules() -> None:
    found = checked("extends: defaults")
    assert (found.ok, found.remarks, found.configs) == (True, [], DEFAULT_RULES)
    assert checked("").configs == ()
    assert checked("").ok


def test_a_preset_raises_no_warning() -> None:
    assert checked("preset: sagemaker").remarks == []


@pytest.mark.parametrize(
    ("rule", "place", "message"),
    [
        ("{rule: overfit, tensors: {exclude: '.*'}}", "tensors.exclude", "matches every name"),
        ("{rule: overfit, tensors: {exclude: ''}}", "tensors.exclude", "matches every name"),
        ("{rule: overfit, tensors: {include: 'a$b'}}", "tensors.include", "in the middle"),
        ("{rule: overfit, tensors: {include: 'a^b'}}", "tensors.include", "in the middle"),
        ("{rule: overfit, tensors: {include: ' a'}}", "tensors.include", "a space"),
        ("{rule: overfit, for: {steps: 10001}}", "for.steps", "more than most runs have"),
        ("{rule: overfit, keep_firing: {seconds: 90000}}", "keep_firing.seconds", "more than a day"),
        ("{rule: stalled_training, for: {steps: 2}}", "for.steps", "watches the clock"),
        ("{rule: stalled_training, actions: [stop]}", "actions", "makes no steps"),
        ("{rule: overfit, actions: [stop, {kind: stop}]}", "actions.1", "duplicate action"),
        ("{rule: overfit, tensors: {collection: encoder}}", "tensors.collection", "do not record by default"),
        ("{rule: overfit, inhibits: [dead_relu]}", "inhibits.0", "is not a rule of this file"),
    ],
)
def test_what_is_probably_not_meant_is_a_warning(rule: str, place: str, message: str) -> None:
    found = checked(f"rules:\n  - {{rule: nan_or_inf}}\n  - {rule}")
    assert found.ok
    assert len(found.configs) == 2
    (remark,) = found.remarks
    assert (remark.line, remark.level, remark.place) == (3, "warning", f"rules.1.{place}")
    assert message in remark.text


@pytest.mark.parametrize("include", ["^a", "a$", "a|^b", "(a$|b)", "[^a]b", r"a\$b", r"a\^b", "a$|b", "x"])
def test_a_regular_expression_that_can_match_raises_none(include: str) -> None:
    assert lines(f"rules: [{{rule: overfit, tensors: {{include: '{include}'}}}}]") == []


def test_two_that_judge_alike_are_reported() -> None:
    text = "rules:\n- {rule: overfit, params: {patience: 5}}\n- {rule: overfit, name: b}"
    assert lines(text) == [(3, "warning", "rules.1.rule")]


def test_no_yaml_is_reported_by_the_reader() -> None:
    with pytest.raises(RuleError, match="not valid YAML"):
        checked("rules: [")


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("rule: overfit\n", "", []),
        ('{"rule": "overfit"}', "mine", []),
        ("rule: overfit\nname: mine\n", "mine", []),
        ("rule: overfit\nname: other\n", "mine", [("error", 2, "name")]),
        ("rule: overfit\nrule: dead_relu\n", "", [("error", 2, "rule")]),
        (
            "rule: overfit\nparams:\n  patience: 0\n  x: 1\n",
            "",
            [("error", 3, "params.patience"), ("error", 4, "params.x")],
        ),
        ("rule: overfit\nfor: {steps: 20000}\n", "", [("warning", 2, "for.steps")]),
        ("rule: nan_or_inf\ninhibits: [overfit]\n", "", []),
        ("a: [\n", "", [("error", 2, "")]),
        ("- rule: overfit\n", "", [("error", 1, "")]),
        ("", "", [("error", 1, "")]),
        ("[" * 5000, "", [("error", 1, "")]),
    ],
)
def test_the_text_of_one_rule_config(text: str, name: str, expected: list[tuple[str, int, str]]) -> None:
    check = check_config_text(text, name)
    assert [(remark.level, remark.line, remark.place) for remark in check.remarks] == expected
    valid = all(level != "error" for level, _, _ in expected)
    assert (check.config is not None) == valid
    if check.config is not None:
        assert check.config.name == (name or check.config.rule)


@pytest.mark.parametrize("config", DEFAULT_RULES, ids=lambda config: config.name)
def test_each_default_rule_can_be_copied(config: RuleConfig) -> None:
    assert check_config_text(json.dumps(config.as_data())).config == config
