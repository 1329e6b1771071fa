from __future__ import annotations

from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, FormatChecker

from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.registry import RULES
from watchstep_rules.rule_files.presets import PRESETS
from watchstep_rules.rule_files.rule_file import rule_file_schema, schema_text, validated

SCHEMA = rule_file_schema()
VALIDATOR = Draft202012Validator(SCHEMA, format_checker=FormatChecker())

GOOD = [
    "rules: []",
    "extends: defaults",
    "preset: sagemaker",
    "rules: [{rule: nan_or_inf}]",
    "rules: [{rule: nan_or_inf, params: {}, actions: [stop]}]",
    "rules: [{rule: nan_or_inf, actions: [{webhook: 'https://example.com/x'}, {notify: ml-oncall}]}]",
    "rules: [{rule: nan_or_inf, actions: [{kind: stop}, {kind: webhook, url: 'http://example.com'}]}]",
    "rules: [{rule: nan_or_inf, actions: [{kind: notify, receiver: a}]}]",
    "rules: [{rule: overfit, for: {steps: 3, seconds: 60}, keep_firing: {seconds: 5}}]",
    "rules: [{rule: overfit, labels: {team: vision}, message: '{tensor} {label.team}', dry_run: true}]",
    "rules: [{rule: overfit, tensors: {collection: losses, include: 'a|b', exclude: '.*c'}, severity: info}]",
    "rules: [{rule: nan_or_inf, inhibits: [overfit]}]",
    "rules: [{rule: nan_or_inf}, {rule: overfit}]\ninhibit: [{source: nan_or_inf, target: [overfit]}]",
    "rules: [{rule: exploding_gradient, params: {growth: 50, window: 30}}]",
    r"rules: [{rule: overfit, tensors: {include: '(?i)\pL+\z'}}]",
    'rules: [{rule: overfit, message: "two\\nlines"}]',
]
BAD = [
    "just text",
    "[]",
    "{}",
    "rule: nan_or_inf",
    "rules: nan_or_inf",
    "rules: [nan_or_inf]",
    "rules: [{}]",
    "rules: [{rule: nan}]",
    "rules: [{rule: nan_or_inf, params: {elements: 1}}]",
    "rules: [{rule: nan_or_inf, params: {max_elements: -1}}]",
    "rules: [{rule: exploding_gradient, params: {max_elements: 1}}]",
    "rules: [{rule: exploding_gradient, params: {growth: large}}]",
    "rules: [{rule: exploding_gradient, params: 3}]",
    "rules: [{rule: sql}]",
    "rules: [{rule: sql, params: {}}]",
    "rules: [{rule: overfit, for: {steps: 0}}]",
    "rules: [{rule: overfit, for: {minutes: 1}}]",
    "rules: [{rule: overfit, for: {seconds: -1}}]",
    "rules: [{rule: overfit, keep_firing: {steps: 0}}]",
    "rules: [{rule: overfit, severity: fatal}]",
    "rules: [{rule: overfit, labels: {team-a: x}}]",
    "rules: [{rule: overfit, labels: {__name__: x}}]",
    "rules: [{rule: overfit, labels: [a]}]",
    "rules: [{rule: overfit, actions: [explode]}]",
    "rules: [{rule: overfit, actions: stop}]",
    "rules: [{rule: overfit, actions: [{}]}]",
    "rules: [{rule: overfit, actions: [{webhook: 'ftp://example.com'}]}]",
    "rules: [{rule: overfit, actions: [{notify: 'a b'}]}]",
    "rules: [{rule: overfit, actions: [{notify: a, webhook: 'https://example.com'}]}]",
    f"rules: [{{rule: overfit, tensors: {{include: '{'a' * 1001}'}}}}]",
    'rules: [{rule: overfit, name: "a\\0b"}]',
    'rules: [{rule: overfit, labels: {team: "a\\eb"}}]',
    'rules: [{rule: overfit, message: "a\\0b"}]',
    "rules: [{rule: overfit, for: {steps: 10000000000}}]",
    "rules: [{rule: overfit, keep_firing: {steps: 10000000000}}]",
    "rules: [{rule: overfit, tensors: {layers: x}}]",
    "rules: [{rule: overfit, dry_run: perhaps}]",
    "rules: [{rule: overfit, inhibits: dead_relu}]",
    "rules: [{rule: overfit, treshold: 3}]",
    "preset: azure",
    "extends: everything",
    "rules: []\ninhibit: [{source: overfit}]",
    "rules: []\ninhibit: [{source: overfit, target: []}]",
]
ONLY_CHECKED = [
    "rules: [{rule: overfit, tensors: {include: '('}}]",
    "rules: [{rule: overfit, tensors: {exclude: '(?!a)'}}]",
    "rules: [{rule: overfit}, {rule: overfit}]",
    "rules: [{rule: overfit, message: '{treshold}'}]",
    "rules: [{rule: stalled_training, inhibits: [overfit]}]",
    "rules: [{rule: overfit, inhibits: [nothing]}]",
]
"""Invalid in a way that a schema cannot express."""


def problems(data: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(data)]


def test_the_schema_is_valid() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert len(schema_text()) < 400_000


@pytest.mark.parametrize("text", GOOD)
def test_what_is_right_is_taken_by_both(text: str) -> None:
    assert (problems(yaml.safe_load(text)), validated(yaml.safe_load(text))[1]) == ([], [])


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_is_refused_by_both(text: str) -> None:
    assert problems(yaml.safe_load(text))
    assert validated(yaml.safe_load(text))[1]


@pytest.mark.parametrize("text", ONLY_CHECKED)
def test_what_only_a_check_can_see(text: str) -> None:
    assert not problems(yaml.safe_load(text))
    assert validated(yaml.safe_load(text))[1]


@pytest.mark.parametrize("configs", [DEFAULT_RULES, *PRESETS.values()])
def test_configs_as_data_are_rule_files(configs: Any) -> None:
    data = {"rules": [without_nulls(config.as_data()) for config in configs]}
    assert (problems(data), validated(data)[1]) == ([], [])


def without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}


@pytest.mark.parametrize("name", sorted(RULES))
def test_each_rule_has_its_parameters(name: str) -> None:
    (branch,) = [
        clause
        for clause in SCHEMA["$defs"]["RuleConfig"]["allOf"]
        if clause["if"]["properties"]["rule"]["const"] == name
    ]
    place = branch["then"]["properties"]["params"]["$ref"].rpartition("/")[2]
    assert set(SCHEMA["$defs"][place].get("properties", {})) == set(RULES[name].params_type.model_fields)
