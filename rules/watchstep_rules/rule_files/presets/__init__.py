"""Rule configs by the name of a preset, as ``preset: NAME`` in a rule file takes them."""

from __future__ import annotations

from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule_files.presets.sagemaker import SAGEMAKER

PRESETS: dict[str, tuple[RuleConfig, ...]] = {"sagemaker": SAGEMAKER}
