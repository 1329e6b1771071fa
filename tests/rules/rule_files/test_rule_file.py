"""Rule files: what they hold, how YAML is read, and what a check reports."""

from __future__ import annotations

import json
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from watchstep.errors import RuleError
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule_files.checks import CheckResult, check_config_text, check_text
from watchstep_rules.rule_files.presets import PRESETS
from watchstep_rules.rule_files.rule_file import MAX_BYTES, check, load, load_as_data, parse

# Files


GOOD = """
rules:
  - rule: vanishing_gradient
    params: {threshold: 1.0e-8}
    tensors: {exclude: "embed.*"}
    for: {steps: 3}
    severity: critical
    actions: [stop]
  - rule: vanishing_gradient
    name: slow
"""


@pytest.mark.ci
def test_a_rule_file_is_a_list_of_configs(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(GOOD, encoding="utf-8")
    first, second = load(path)
    assert (first.name, first.hold.steps, first.stops) == ("vanishing_gradient", 3, True)
    assert second.name == "slow"
    loaded = load_as_data(path)
    assert loaded.configs == (first.as_data(), second.as_data())
    assert loaded.needs == ()
    assert check({"rules": loaded.configs}, "again") == (first, second)


def test_the_sdk_finds_the_reader_by_entry_point() -> None:
    (entry,) = entry_points(group="watchstep.rule_files")
    assert entry.load() is load_as_data


@pytest.mark.parametrize("text", ["", "# nothing", "rules: []"])
def test_an_empty_file_has_no_rules(text: str) -> None:
    assert parse(text, "rules.yaml") == ()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("rules: [", "not valid YAML (line 1, column 9: "),
        ("a: b: c", "not valid YAML (line 1, column 5: "),
        ("rules: !!python/object:os.system {}", "not valid YAML (line 1, column 8: "),
        ("\x07", "not valid YAML"),
        ("- rule: nan_or_inf", "rules: not a mapping: start"),
        ("just text", "rules: not a mapping: start"),
        ("rule: nan_or_inf", "rule: Extra inputs are not permitted"),
        ("{}", "rules: Field required"),
        ("rules: nan_or_inf", "rules: Input should be a list"),
        ("rules: [nan_or_inf]", "rules.0: Input should be a mapping"),
        ("rules: [{rule: nan}]", "rules.0.rule: unknown rule 'nan'; use one of: "),
        (
            "rules: [{rule: nan_or_inf}, {rule: nan_or_inf}]",
            "rules.1: two rule configs are named 'nan_or_inf': give one of them",
        ),
        ("rules: [{rule: nan_or_inf, for: {steps: 0}}]", "rules.0.for.steps: "),
        ("rules: [{rule: nan_or_inf, params: {max_elements: -1}}]", "rules.0.params.max_elements: "),
        (
            "rules: [{rule: nan_or_inf, params: {elements: 1}}]",
            "rules.0.params.elements: Extra inputs are not permitted",
        ),
        ("rules: [{rule: nan_or_inf, actions: [explode]}]", "rules.0.actions.0"),
    ],
)
def test_a_wrong_file_names_the_place_and_the_mend(text: str, place: str) -> None:
    line = "" if place.startswith("not valid") else "line 1: "
    with pytest.raises(RuleError, match=r"^rule file my/rules.yaml: " + re.escape(line + place)) as caught:
        parse(text, "my/rules.yaml")
    assert caught.value.hint


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        RuleError, match=r"nothing.yaml: cannot be read .*No such file.*\n  hint: check the path"
    ):
        load(tmp_path / "nothing.yaml")
    with pytest.raises(RuleError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("rules: [] # ü".encode("latin-1"))
    with pytest.raises(RuleError, match="cannot be read"):
        load(tmp_path / "latin.yaml")


def names(text: str) -> list[str]:
    return [config.name for config in parse(text, "rules.yaml")]


def test_a_file_may_begin_with_the_defaults() -> None:
    assert parse("extends: defaults", "rules.yaml") == DEFAULT_RULES
    text = """
extends: defaults
rules:
  - {rule: overfit, severity: info}
  - {rule: gradient_norm_spike}
  - {rule: overfit, name: late}
"""
    read = parse(text, "rules.yaml")
    assert [config.name for config in read] == [
        *(rule.name for rule in DEFAULT_RULES),
        "gradient_norm_spike",
        "late",
    ]
    assert next(config for config in read if config.name == "overfit").severity == "info"


def test_what_a_file_does_not_say_of_a_default_stays_as_it_is() -> None:
    text = """
extends: defaults
rules:
  - {rule: nan_or_inf, labels: {team: vision}, params: {steps_without_update: 9}}
  - {rule: loss_not_decreasing, actions: [stop], params: {patience: 300}}
"""
    given = {config.name: config for config in DEFAULT_RULES}
    read = {config.name: config for config in parse(text, "rules.yaml")}
    first, second = read["nan_or_inf"], read["loss_not_decreasing"]
    assert (first.stops, first.severity, first.labels) == (True, "critical", {"team": "vision"})
    assert first.inhibits == given["nan_or_inf"].inhibits
    assert first.params == {"steps_without_update": 9}
    assert (second.stops, second.hold) == (True, given["loss_not_decreasing"].hold)
    assert RuleConfig.model_validate(second.as_data()) == second


def test_a_rule_of_another_kind_takes_the_whole_place_of_its_namesake() -> None:
    (config,) = (
        rule
        for rule in parse("extends: defaults\nrules: [{rule: loss_spike, name: nan_or_inf}]", "rules.yaml")
        if rule.name == "nan_or_inf"
    )
    assert (config.rule, config.stops, config.severity) == ("loss_spike", False, "warning")


def test_a_file_may_begin_with_a_preset() -> None:
    (preset, *_) = (config for config in PRESETS["sagemaker"])
    text = f"preset: sagemaker\nrules: [{{rule: {preset.rule}, name: {preset.name}, dry_run: true}}]"
    read = parse(text, "rules.yaml")
    assert names(text) == [config.name for config in PRESETS["sagemaker"]]
    assert read[0].dry_run
    both = names("extends: defaults\npreset: sagemaker")
    assert len(both) == len(set(both)) >= len(DEFAULT_RULES)


def test_inhibitions_of_the_file_become_those_of_the_sources() -> None:
    text = """
rules:
  - {rule: nan_or_inf, inhibits: [overfit]}
  - {rule: overfit}
  - {rule: exploding_gradient, name: wild}
inhibit:
  - {source: nan_or_inf, target: [wild, overfit]}
"""
    assert [config.inhibits for config in parse(text, "rules.yaml")] == [("overfit", "wild"), (), ()]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "inhibit: [{source: nan_or_inf, target: [nothing]}]",
            "inhibit.0.target.0: no rule config and no rule",
        ),
        (
            "inhibit: [{source: slow_convergence, target: [overfit]}]",
            "inhibit.0.source: slow_convergence has severity info: notes inhibit nothing",
        ),
        ("inhibit: [{source: late, target: [overfit]}]", "inhibit.0.source: no rule config is named 'late'"),
        (
            "inhibit: [{source: overfit, target: [nan_or_inf]}]",
            "inhibit.0.target.0: nan_or_inf is evaluated as the rows of each",
        ),
        ("inhibit: [{source: overfit, target: []}]", "inhibit.0.target: Tuple should have at least 1"),
        (
            "inhibit: [{source: overfit, target: [dead_relu]}, {source: dead_relu, target: [overfit]}]",
            "rules.1: rules inhibit each other in a cycle: overfit, dead_relu",
        ),
        ("preset: azure", "preset: no preset is named 'azure': use one of sagemaker"),
        ("extends: everything", "extends: Input should be 'defaults'"),
    ],
)
def test_what_does_not_fit_together_is_refused(text: str, fault: str) -> None:
    note = "{rule: slow_convergence, severity: info}"
    rules = f"rules: [{{rule: nan_or_inf}}, {{rule: overfit}}, {{rule: dead_relu}}, {note}]\n"
    with pytest.raises(RuleError, match=r"^rule file rules.yaml: line 2: " + re.escape(fault)) as caught:
        parse(rules + text, "rules.yaml") if "cycle" not in fault else parse(
            text + "\n" + rules, "rules.yaml"
        )
    assert caught.value.hint


def test_all_faults_are_counted_and_the_first_has_its_line() -> None:
    text = """
rules:
  - rule: exploding_gradient
    params:
      growth: 0.5
    severity: fatal
  - rule: overfit
  - rule: overfit
"""
    with pytest.raises(RuleError, match=r"rules.yaml: line 5: rules.0.params.growth: .* \(and 2 more"):
        parse(text, "rules.yaml")


def test_a_huge_file_is_refused() -> None:
    with pytest.raises(RuleError, match="over the limit"):
        parse("#" * (MAX_BYTES + 1), "rules.yaml")


# YAML


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 8)
)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("9" * 900, "line 3"),
        ("9" * 5000, "line 3, column 9: a number of 5000 characters"),
        ("1:" + "59:" * 5000 + "59", "line 3, column 9: a number of "),
        ("2024-13-45", "line 3, column 9: '2024-13-45' is not a valid timestamp; put it in quotes"),
        ("!!int abc", "line 3, column 9: 'abc' is not a valid int"),
        ("!!int ''", "line 3, column 9: '' is not a valid int"),
        ("!!float abc", "line 3, column 9: 'abc' is not a valid float"),
        ("!!bool abc", "line 3, column 9: 'abc' is not a valid bool"),
        ("!!timestamp abc", "line 3, column 9: 'abc' is not a valid timestamp"),
        ("&a [*a]", "line 3, column 9: an alias contains itself"),
        ("{? &b {? *b : 1} : 2}", "line 3, column "),
        ('"a\\0b"', "line 3: rules.0.name: 'a\\x00b' has a control character at position 2"),
        ('"a\\uD800b"', "line 3: rules.0.name: "),
        (f"{'x' * 129}", "line 3: rules.0.name: "),
    ],
)
def test_an_invalid_value_is_reported_with_its_line(value: str, fault: str) -> None:
    with pytest.raises(RuleError, match=re.escape(fault)):
        parse(f"rules:\n- rule: nan_or_inf\n  name: {value}\n", "mine.yaml")


@pytest.mark.parametrize("text", [BOMB, MERGES, f"{BOMB}rules:\n- rule: nan_or_inf\n  name: *a7\n"])
def test_a_short_text_does_not_expand_much(text: str) -> None:
    with pytest.raises(RuleError, match="aliases expand to more than 20000 values"):
        parse(text, "mine.yaml")


def test_aliases_may_be_used() -> None:
    text = "rules:\n- &a {rule: nan_or_inf, name: a, for: &f {steps: 3}}\n- {<<: *a, name: b}\n- {rule: overfit, for: *f}\n"
    assert [config.name for config in parse(text, "mine.yaml")] == ["a", "b", "overfit"]
    assert [config.hold.steps for config in parse(text, "mine.yaml")] == [3, 3, 3]


@pytest.mark.parametrize(
    "params", ["{max_elements: 99999999999999999999999}", "{max_elements: .inf}", '{max_elements: "\\0"}']
)
def test_parameters_can_be_kept_in_a_database(params: str) -> None:
    with pytest.raises(RuleError, match=r"line 3: rules\.0\.params: "):
        parse(f"rules:\n- rule: nan_or_inf\n  params: {params}\n", "mine.yaml")


def test_a_file_without_an_end_is_read_to_the_limit() -> None:
    with pytest.raises(RuleError, match="over the limit of 1048576 bytes"):
        load("/dev/zero")


# Checks


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
