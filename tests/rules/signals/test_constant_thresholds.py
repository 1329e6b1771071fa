"""Constant thresholds name existing rules, parameters and figures."""

from __future__ import annotations

import pytest

from watchstep.reading.columns import needs_of
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.signals.constant_thresholds import ConstantThreshold, constant_thresholds

EXPECTED: list[tuple[str, dict[str, float], list[tuple[str, str, float, str]]]] = [
    ("vanishing_gradient", {"threshold": 1e-5}, [("abs_mean", "threshold", 1e-5, "below")]),
    ("all_zero", {}, [("zero_share", "share", 1.0, "above")]),
    ("tensor_variance", {"min_threshold": 0.5}, [("variance", "min_threshold", 0.5, "below")]),
    ("exploding_gradient", {}, []),
]


@pytest.mark.parametrize(("rule", "params", "expected"), EXPECTED)
def test_thresholds_of_a_config(
    rule: str, params: dict[str, float], expected: list[tuple[str, str, float, str]]
) -> None:
    config = RuleConfig(rule=rule, params=params)
    found = constant_thresholds(config.rule, config.parameters)
    assert found == [ConstantThreshold(*entry) for entry in expected]  # type: ignore[arg-type]
    for threshold in found:
        assert needs_of(threshold.figure)
