"""The rules by name."""

from __future__ import annotations

from watchstep.errors import RuleError
from watchstep_rules.contract import AnyRule
from watchstep_rules.exploding_gradient import ExplodingGradient
from watchstep_rules.nan_or_inf import NanOrInf
from watchstep_rules.vanishing_gradient import VanishingGradient

RULES: dict[str, AnyRule] = {
    rule.name: rule for rule in (NanOrInf(), VanishingGradient(), ExplodingGradient())
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
