"""Rules over recorded statistics: the contract, the built-in rules, alerts and rule files."""

from watchstep_rules.config import RuleConfig
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding
from watchstep_rules.guard import Guard
from watchstep_rules.rule_file import load

__all__ = ["Finding", "Guard", "Needs", "Params", "Rule", "RuleConfig", "State", "load"]
