"""Rules over recorded statistics: the contract, the built-in rules, alerts and rule files.

Each built-in rule is a name here, too, to attach it to a job: ``nan_or_inf().stop()`` (see `AttachedRule`). The
modules of the same names are imported first, so that these names stand for the functions from then on; the modules stay
reachable as ``from watchstep_rules.builtin.gradients.nan_or_inf import NanOrInf``.
"""

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
__all__ += by_name.__all__
