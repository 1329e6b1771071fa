"""Rules over recorded statistics: the rule contract, the built-in and the default rules, rule files, backtests and explanations.

Each built-in rule is also available here as a function that attaches it to a job: ``nan_or_inf().stop()`` (see `AttachedRule`).
Its class is ``from watchstep_rules.builtin.gradients.nan_or_inf import NanOrInf``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watchstep_rules.backtest.backtest import AttemptOutcome, BacktestOutcome, backtest_run
    from watchstep_rules.backtest.replay import ReplayOutcome
    from watchstep_rules.config import by_name
    from watchstep_rules.config.attached import AttachedRule
    from watchstep_rules.config.by_name import *  # noqa: F403 - the rules, as by_name's __all__ lists them
    from watchstep_rules.config.defaults import DEFAULT_RULES
    from watchstep_rules.config.rule_config import RuleConfig
    from watchstep_rules.engine.alert import Transition
    from watchstep_rules.engine.incident import Explanation, explain
    from watchstep_rules.guard import Guard
    from watchstep_rules.registry import find_rule
    from watchstep_rules.rule import Finding, Needs, Params, Rule, State, TensorNeeds, finding_at
    from watchstep_rules.rule_files.rule_file import load, parse
    from watchstep_rules.saved_block import SavedBlock
    from watchstep_rules.signals.reference import reference_of

__all__ = [
    "DEFAULT_RULES",
    "AttachedRule",
    "AttemptOutcome",
    "BacktestOutcome",
    "Explanation",
    "Finding",
    "Guard",
    "Needs",
    "Params",
    "ReplayOutcome",
    "Rule",
    "RuleConfig",
    "SavedBlock",
    "State",
    "TensorNeeds",
    "Transition",
    "backtest_run",
    "explain",
    "find_rule",
    "finding_at",
    "load",
    "parse",
    "reference_of",
]
if TYPE_CHECKING:
    __all__ += by_name.__all__

_MODULES = {
    "AttachedRule": "watchstep_rules.config.attached",
    "AttemptOutcome": "watchstep_rules.backtest.backtest",
    "BacktestOutcome": "watchstep_rules.backtest.backtest",
    "DEFAULT_RULES": "watchstep_rules.config.defaults",
    "Explanation": "watchstep_rules.engine.incident",
    "Finding": "watchstep_rules.rule",
    "Guard": "watchstep_rules.guard",
    "Needs": "watchstep_rules.rule",
    "Params": "watchstep_rules.rule",
    "ReplayOutcome": "watchstep_rules.backtest.replay",
    "Rule": "watchstep_rules.rule",
    "RuleConfig": "watchstep_rules.config.rule_config",
    "SavedBlock": "watchstep_rules.saved_block",
    "State": "watchstep_rules.rule",
    "TensorNeeds": "watchstep_rules.rule",
    "Transition": "watchstep_rules.engine.alert",
    "backtest_run": "watchstep_rules.backtest.backtest",
    "explain": "watchstep_rules.engine.incident",
    "find_rule": "watchstep_rules.registry",
    "finding_at": "watchstep_rules.rule",
    "load": "watchstep_rules.rule_files.rule_file",
    "parse": "watchstep_rules.rule_files.rule_file",
    "reference_of": "watchstep_rules.signals.reference",
}


def __getattr__(name: str) -> Any:
    """Load the module of a name when it is first used: a process that needs one part of the package loads no rules."""
    if not name.startswith("_"):
        module = import_module(_MODULES.get(name, "watchstep_rules.config.by_name"))
        if name in _MODULES or name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module 'watchstep_rules' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names of the package, with those of the rules."""
    return sorted({*globals(), *_MODULES, *import_module("watchstep_rules.config.by_name").__all__})
