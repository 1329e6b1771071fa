"""What a recorder's rules may cost: it is not the one who pays for the service."""

from __future__ import annotations

from collections.abc import Sequence

from watchstep.errors import RuleError
from watchstep_rules.config import RuleConfig
from watchstep_rules.sql_rule import Sql, SqlParams

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
    if len(asked) > MOST_RULES:
        raise RuleError(f"{len(asked)} rules: a recorder may ask for {MOST_RULES}", _MEND)
    queries = [(config.name, config.parameters) for config in asked if config.rule == Sql.name]
    if len(queries) > MOST_QUERIES:
        raise RuleError(f"{len(queries)} SQL rules: a recorder may ask for {MOST_QUERIES}", _MEND)
    for name, params in queries:
        assert isinstance(params, SqlParams)
        if params.seconds > MOST_SECONDS or params.memory_mb > MOST_MIB:
            raise RuleError(
                f"rule {name!r}: seconds = {params.seconds:g}, memory_mb = {params.memory_mb}: a recorder's SQL rule may take "
                f"{MOST_SECONDS:g} s and {MOST_MIB} MiB a step",
                _MEND,
            )
