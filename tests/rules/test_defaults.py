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


WAIT_BY_THEMSELVES = {"dead_relu", "saturated_activation", "class_imbalance"}
"""They fire after several records, or when chance is ruled out."""
ONCE = {"poor_initialization"}


def test_rules_that_judge_by_size_wait_for_a_second_look() -> None:
    at_once = {config.rule for config in DEFAULT_RULES if config.hold.steps == 1 and not config.stops}
    assert at_once <= WAIT_BY_THEMSELVES | ONCE
