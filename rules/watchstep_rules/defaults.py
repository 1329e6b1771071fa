"""The rules that judge a run when its owner names none."""

from __future__ import annotations

from watchstep_rules.config import Hold, RuleConfig, StopAction

DEFAULT_RULES: tuple[RuleConfig, ...] = (
    RuleConfig(rule="nan_or_inf", severity="critical", actions=(StopAction(),)),
    RuleConfig(rule="exploding_gradient", severity="warning", hold=Hold(steps=2)),
    RuleConfig(rule="vanishing_gradient", severity="warning", hold=Hold(steps=10)),
)
"""Only what cannot be a false alarm stops a job by default: a training does not come back from NaN."""
