from __future__ import annotations

from watchstep_rules.config.defaults import DEFAULT_RULES, OFF_BY_DEFAULT
from watchstep_rules.registry import RULES
from watchstep_rules.rule_files.rule_file import check


def test_the_defaults_are_a_rule_file() -> None:
    assert check({"rules": [config.as_data() for config in DEFAULT_RULES]}, "defaults") == DEFAULT_RULES


def test_every_rule_is_on_by_default_once_or_off() -> None:
    on = [config.rule for config in DEFAULT_RULES]
    assert sorted([*on, *OFF_BY_DEFAULT]) == sorted(RULES)


def test_only_what_does_not_return_stops_a_job() -> None:
    assert [config.rule for config in DEFAULT_RULES if config.stops] == ["nan_or_inf"]


WAIT_BY_THEMSELVES = {
    "dead_relu",
    "saturated_activation",
    "class_imbalance",
    "symmetric_units",
    "frozen_batch_norm",
    "running_statistics_frozen",
    "starved_expert",
    "hyperparameter_jump",
    "absent_from_optimizer",
    "loss_spike",
    "gradients_cease",
    "validation_loss_jump",
}
"""They fire after several records, or when chance is ruled out."""
ONCE = {"poor_initialization"}
EXACT = {"replica_divergence", "scaler_skips", "missing_zero_grad", "optimizer_not_stepping"}
"""They compare bits, or count what the program reports."""


def test_one_fault_of_a_layer_or_loss_is_one_alert() -> None:
    lasting = {config.rule: config.timing.keep_steps for config in DEFAULT_RULES}
    assert {name for name, steps in lasting.items() if steps == 100} == {
        "loss_not_decreasing",
        "slow_convergence",
        "oscillating_loss",
        "loss_spike",
        "lost_progress",
    }
    assert {name for name, steps in lasting.items() if steps == 10} == {
        "vanishing_gradient",
        "dead_relu",
        "saturated_activation",
        "weight_not_updating",
        "unlike_earlier_runs",
        "hyperparameter_jump",
        "gradients_cease",
        "starved_expert",
    }


def test_rules_that_judge_by_size_wait_for_a_second_look() -> None:
    at_once = {config.rule for config in DEFAULT_RULES if config.hold.steps == 1 and not config.stops}
    assert at_once <= WAIT_BY_THEMSELVES | ONCE | EXACT
