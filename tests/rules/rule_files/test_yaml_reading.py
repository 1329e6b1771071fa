"""Malicious rule files: every fault is reported with its line, and nothing takes long."""

from __future__ import annotations

import re

import pytest

from watchstep.errors import RuleError
from watchstep_rules.rule_files.rule_file import load, parse

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
