"""The rules that judge a run when its owner names none."""

from __future__ import annotations

from watchstep_rules.config import Hold, RuleConfig, StopAction

DEFAULT_RULES: tuple[RuleConfig, ...] = (
    RuleConfig(rule="nan_or_inf", severity="critical", actions=(StopAction(),)),
    RuleConfig(rule="exploding_gradient", severity="warning", hold=Hold(steps=2)),
    RuleConfig(rule="vanishing_gradient", severity="warning", hold=Hold(steps=5)),
    RuleConfig(rule="dead_relu", severity="warning"),
    RuleConfig(rule="saturated_activation", severity="warning"),
    RuleConfig(rule="poor_initialization", severity="warning"),
    RuleConfig(rule="weight_not_updating", severity="warning", hold=Hold(steps=3)),
    RuleConfig(rule="class_imbalance", severity="info"),
    RuleConfig(rule="loss_not_decreasing", severity="warning", hold=Hold(steps=5)),
    RuleConfig(rule="slow_convergence", severity="warning", hold=Hold(steps=5)),
    RuleConfig(rule="oscillating_loss", severity="warning", hold=Hold(steps=3)),
    RuleConfig(rule="overfit", severity="warning", hold=Hold(steps=2)),
)
"""Only what cannot be a false alarm stops a job by default: a training does not come back from NaN."""
