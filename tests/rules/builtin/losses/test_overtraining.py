from __future__ import annotations

from typing import Any

import numpy as np

from tests.rules.builtin.losses.losses import Curve, falling, noisy, run_of
from tests.rules.runs import all_at_once
from watchstep_rules.config.rule_config import RuleConfig


def found(losses: Curve, evaluations: Curve | None = None, **params: object) -> list[tuple[int, str]]:
    block = run_of(losses, evaluations=() if evaluations is None else evaluations)
    outcome = all_at_once(RuleConfig(rule="overtraining", params=params), block)
    return [(finding.step, finding.mode) for finding in outcome.findings]


def test_a_loss_that_came_to_rest_is_found_after_its_patience() -> None:
    losses = np.concatenate([falling(2.0, 0.5, 200, 20.0), np.full(600, 0.5)])
    steps = [step for step, _ in found(losses)]
    assert 600 < steps[0] < 700
    assert steps[-1] == 799
    assert found(losses, patience_train=700) == []


def test_a_loss_that_still_falls_is_fine() -> None:
    assert found(noisy(falling(2.0, 0.0, 900, 300.0), 0.1)) == []


def test_evaluations_have_a_patience_of_their_own() -> None:
    losses, flat = falling(2.0, 0.0, 300, 300.0), np.full(30, 0.7)
    assert found(losses, flat) == [(step, "eval") for step in range(200, 300, 10)]
    assert found(losses, falling(2.0, 0.1, 30, 30.0)) == []


def test_single_losses_count_and_delta_is_absolute_as_in_amazons_rule() -> None:
    amazon: dict[str, Any] = {
        "window": 1,
        "as_share": False,
        "patience_train": 5,
        "patience_validation": 10,
        "delta": 0.01,
    }
    assert found(np.array([1.0, 0.995, 0.994, 0.993, 0.992, 0.991, 0.98]), **amazon) == [(5, "train")]
    assert found(np.array([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]), **amazon) == []


def test_what_is_not_finite_is_omitted() -> None:
    assert found(np.array([1.0, *[np.nan] * 9]), window=1, patience_train=5) == []
