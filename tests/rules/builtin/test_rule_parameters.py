"""Parameters that no rule can be judged by are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from watchstep_rules.config.rule_config import RuleConfig

REFUSED: dict[str, list[dict[str, Any]]] = {
    "exploding_gradient": [
        *({"growth": 1}, {"growth": math.inf}, {"window": 1}, {"window": 1001}),
        *({"warmup": 0}, {"patience": 3}),
    ],
    "vanishing_gradient": [
        *({"threshold": 0}, {"threshold": math.nan}, {"relative": 0}, {"relative": 1.1}),
        *({"min_dimensions": -1}, {"treshold": 1}),
    ],
    "non_finite_values": [{"max_elements": -1}, {"max_elements": "many"}, {"elements": 1}, {"only_nan": 3}],
    "loss_not_decreasing": [{"patience": 3}, {"min_fall": 0}, {"growth": 1}, {"certainty": 0}, {"x": 1}],
    "slow_convergence": [{"patience": 3}, {"max_fall": 1}, {"small_update": 0}, {"x": 1}],
    "lost_progress": [{"window": 1}, {"fallen": 1}, {"back": 0}, {"lasting": 0}, {"x": 1}],
    "oscillating_loss": [{"window": 2}, {"swing": 0}, {"alternation": 1}, {"x": 1}],
    "overfit": [{"patience": 0}, {"rise": 0}, {"train_fall": 1}, {"window": 0}, {"x": 1}],
    "validation_loss_jump": [
        *({"window": 0}, {"lasting": 0}, {"warmup": 1}, {"fallen": 1}, {"rise": 1}, {"falls": 0}, {"x": 1}),
    ],
    "optimizer_not_stepping": [{"passes": 199}, {"x": 1}],
    "similar_across_runs": [
        {"elementwise": True},
        {"elementwise": True, "run": "a", "reference": {"loss": [[0, 1.0]]}},
        {"elementwise": True, "run": "a/b"},
        {"elementwise": True, "run": "..", "every": 10},
        {"elementwise": True, "run": "a", "every": 0},
        {"elementwise": True, "run": "a", "rtol": -1},
    ],
}


@pytest.mark.parametrize(
    ("rule", "params"), [(rule, params) for rule, refused in REFUSED.items() for params in refused], ids=str
)
def test_wrong_parameters_are_refused(rule: str, params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RuleConfig(rule=rule, params=params)
