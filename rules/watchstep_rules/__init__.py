"""Rules over recorded statistics: the rule contract, the built-in rules, alerts and rule files.

Each built-in rule is also available here as a function that attaches it to a job: ``nan_or_inf().stop()`` (see `AttachedRule`).
Its class is ``from watchstep_rules.builtin.gradients.nan_or_inf import NanOrInf``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watchstep_rules.config import by_name
    from watchstep_rules.config.attached import AttachedRule
    from watchstep_rules.config.by_name import *  # noqa: F403 - the rules, as by_name's __all__ lists them
    from watchstep_rules.config.rule_config import RuleConfig
    from watchstep_rules.guard import Guard
    from watchstep_rules.rule import Finding, Needs, Params, Rule, State
    from watchstep_rules.rule_files.rule_file import load

__all__ = [
    "AttachedRule",
    "Finding",
    "Guard",
    "Needs",
    "Params",
    "Rule",
    "RuleConfig",
    "State",
    "load",
]
if TYPE_CHECKING:
    __all__ += by_name.__all__

_MODULES = {
    "AttachedRule": "watchstep_rules.config.attached",
    "Finding": "watchstep_rules.rule",
    "Guard": "watchstep_rules.guard",
    "Needs": "watchstep_rules.rule",
    "Params": "watchstep_rules.rule",
    "Rule": "watchstep_rules.rule",
    "RuleConfig": "watchstep_rules.config.rule_config",
    "State": "watchstep_rules.rule",
    "load": "watchstep_rules.rule_files.rule_file",
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
