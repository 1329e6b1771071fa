"""What a recorder's rules may cost: it is not the one who pays for the service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from watchstep.errors import RuleError
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sql.rule import Sql, SqlParams

MOST_RULES = 100
MOST_QUERIES = 3
MOST_SECONDS = 1.0
"""For one step of one query, as by default; over the rows of a step it takes some milliseconds."""

MOST_MIB = 256

_MEND = "have an operator ask for it, or give the rule file to the service"


def check(asked: Sequence[RuleConfig]) -> None:
    """See that rules which a recorder asks for keep the workers free for others.

    Raises:
        RuleError: too many, or a SQL rule that may take too much.
    """
    _check_counts([config.rule for config in asked])
    queries = [(config.name, config.parameters) for config in asked if config.rule == Sql.name]
    for name, params in queries:
        assert isinstance(params, SqlParams)
        if params.seconds > MOST_SECONDS or params.memory_mb > MOST_MIB:
            raise RuleError(
                f"rule {name!r}: seconds = {params.seconds:g}, memory_mb = {params.memory_mb}: a recorder's SQL rule may take "
                f"{MOST_SECONDS:g} s and {MOST_MIB} MiB a step",
                _MEND,
            )


def check_counts(data: Sequence[Any]) -> None:
    """Refuse data of too many rules before any of their queries is checked, which takes a process and seconds.

    Raises:
        RuleError: too many rules, or too many SQL rules.
    """
    _check_counts(_rules_in(data))


def has_queries(data: Sequence[Any]) -> bool:
    """Whether data of rules has SQL rules, to check which takes a process and seconds."""
    return any(rule == Sql.name for rule in _rules_in(data))


def _rules_in(data: Sequence[Any]) -> list[Any]:
    return [entry.get("rule") if isinstance(entry, dict) else None for entry in data]


def _check_counts(rules: Sequence[Any]) -> None:
    if len(rules) > MOST_RULES:
        raise RuleError(f"{len(rules)} rules: a recorder may ask for {MOST_RULES}", _MEND)
    queries = sum(rule == Sql.name for rule in rules)
    if queries > MOST_QUERIES:
        raise RuleError(f"{queries} SQL rules: a recorder may ask for {MOST_QUERIES}", _MEND)
