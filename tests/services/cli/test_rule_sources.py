"""``watchstep serve`` prints where the rules that may stop jobs come from."""

from __future__ import annotations

import pytest

from watchstep_rules import DEFAULT_RULES, parse
from watchstep_services.cli.serve import source_of

INHIBIT = "inhibit: [{source: nan_or_inf, target: [overfit]}]\n"
CASES = {
    "extends: defaults\nrules: [{rule: loss_spike, actions: [stop]}]": {
        "nan_or_inf": "default rule",
        "loss_spike": "of your rule file",
    },
    f"extends: defaults\n{INHIBIT}": {"nan_or_inf": "default rule"},
    "extends: defaults\nrules: [{rule: nan_or_inf, severity: warning}]": {"nan_or_inf": "of your rule file"},
    "rules: [{rule: nan_or_inf, actions: [stop]}]": {"nan_or_inf": "of your rule file"},
}


@pytest.mark.parametrize("text", CASES)
def test_rules_of_a_file(text: str) -> None:
    sources = {config.name: source_of(config, has_file=True) for config in parse(text, "rules.yaml")}
    assert {name: sources[name] for name in CASES[text]} == CASES[text]


def test_rules_without_a_file() -> None:
    assert {source_of(config, has_file=False) for config in DEFAULT_RULES} == {"default rule"}
