"""What the docs say of defaults is of rules and parameters that there are, and of all of them."""

from __future__ import annotations

import json

from docs.default_sources import SOURCES
from docs.tables import FOLDER
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.registry import RULES


def test_every_source_is_of_a_parameter() -> None:
    known = {name: set(RULES[name].params_type.model_fields) for name in SOURCES}
    assert {
        name: set(sources) - known[name] for name, sources in SOURCES.items() if set(sources) - known[name]
    } == {}


def test_every_default_of_a_rule_that_has_sources_has_one() -> None:
    for config in DEFAULT_RULES:
        if config.rule in SOURCES:
            assert set(SOURCES[config.rule]) == set(type(config.parameters).model_fields), config.rule


def test_every_default_rule_names_what_it_cannot_distinguish() -> None:
    assert [config.rule for config in DEFAULT_RULES if not RULES[config.rule].cannot_distinguish] == []


def test_what_was_measured_is_of_rules_that_there_are() -> None:
    measured = json.loads((FOLDER / "margins.json").read_text(encoding="utf-8"))
    assert {name.partition("/")[0] for name in measured["configs"]} <= set(RULES)
