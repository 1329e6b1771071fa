from __future__ import annotations

from watchstep_rules.defaults import DEFAULT_RULES
from watchstep_rules.registry import RULES
from watchstep_rules.rule_file import check


def test_the_defaults_are_a_rule_file() -> None:
    assert check({"rules": [config.as_data() for config in DEFAULT_RULES]}, "defaults") == DEFAULT_RULES


def test_every_rule_is_on_by_default_once() -> None:
    assert sorted(config.rule for config in DEFAULT_RULES) == sorted(RULES)


def test_only_what_does_not_come_back_stops_a_job() -> None:
    assert [config.rule for config in DEFAULT_RULES if config.stops] == ["nan_or_inf"]


def test_rules_that_judge_by_size_wait_for_a_second_look() -> None:
    assert all(config.hold.steps > 1 for config in DEFAULT_RULES if not config.stops)
