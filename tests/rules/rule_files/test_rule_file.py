from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from watchstep.errors import RuleError
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule_files.presets import PRESETS
from watchstep_rules.rule_files.rule_file import MAX_BYTES, check, load, load_as_data, parse

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
