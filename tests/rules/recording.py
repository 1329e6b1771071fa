"""Trainings that are recorded for real, and judged by one rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.rules.runs import all_at_once
from watchstep import CaptureConfig, Hook, open_run
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.rule import Finding

EVERYTHING = CaptureConfig(overhead_budget=None)
"""Adaptive collections at every step, whatever it costs: what is found must not depend on the clock."""


def said_of(
    train: Callable[[Hook], None],
    rule: str,
    folder: Path,
    params: dict[str, object] | None = None,
    *,
    config: CaptureConfig = EVERYTHING,
) -> list[Finding]:
    """Train with a hook, and judge what was recorded by one rule."""
    with Hook(folder, config=config) as hook:
        train(hook)
    assert not hook.health["faults"]
    said = all_at_once(RuleConfig(rule=rule, params=params or {}), open_run(hook.run_url).rows())
    assert said.memory.health is not RuleHealth.ERROR, said.memory.problem
    return said.findings
