"""The rules by name."""

from __future__ import annotations

from watchstep.errors import RuleError
from watchstep_rules.class_imbalance import ClassImbalance
from watchstep_rules.contract import AnyRule
from watchstep_rules.dead_relu import DeadRelu
from watchstep_rules.exploding_gradient import ExplodingGradient
from watchstep_rules.loss_not_decreasing import LossNotDecreasing
from watchstep_rules.nan_or_inf import NanOrInf
from watchstep_rules.oscillating_loss import OscillatingLoss
from watchstep_rules.overfit import Overfit
from watchstep_rules.poor_initialization import PoorInitialization
from watchstep_rules.saturated_activation import SaturatedActivation
from watchstep_rules.slow_convergence import SlowConvergence
from watchstep_rules.vanishing_gradient import VanishingGradient
from watchstep_rules.weight_not_updating import WeightNotUpdating

RULES: dict[str, AnyRule] = {
    rule.name: rule
    for rule in (
        NanOrInf(),
        VanishingGradient(),
        ExplodingGradient(),
        DeadRelu(),
        LossNotDecreasing(),
        OscillatingLoss(),
        Overfit(),
        SlowConvergence(),
        SaturatedActivation(),
        PoorInitialization(),
        WeightNotUpdating(),
        ClassImbalance(),
    )
}


def find_rule(name: str) -> AnyRule:
    """The rule of that name.

    Raises:
        RuleError: there is none.
    """
    try:
        return RULES[name]
    except KeyError:
        raise RuleError(f"unknown rule {name!r}", f"use one of: {', '.join(sorted(RULES))}") from None
