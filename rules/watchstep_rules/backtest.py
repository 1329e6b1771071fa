"""Rules over a finished run: what would have fired, and when.

Rules are split invariant: judging all rows at once says what judging them as they came in would have said, as long as
no worker's rows came after the step was sealed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from watchstep.block import Block
from watchstep_rules.alert import Phase, Transition
from watchstep_rules.config import RuleConfig
from watchstep_rules.finding import Finding
from watchstep_rules.judge import Health, Progress, RuleMemory, judge


@dataclass(frozen=True)
class Outcome:
    """What one rule config says of a run.

    Attributes:
        config: the rule config.
        findings: all of them, in the order of the rows.
        transitions: changes of its alert.
        health: whether it could be evaluated.
        problem: why not.
    """

    config: RuleConfig
    findings: list[Finding]
    transitions: list[Transition]
    health: Health
    problem: str

    @property
    def fired(self) -> list[Transition]:
        """When the alert began to fire, each time."""
        return [transition for transition in self.transitions if transition.phase is Phase.FIRING]


def backtest(rows: Block, configs: Sequence[RuleConfig]) -> list[Outcome]:
    """Judge all rows of one attempt.

    Args:
        rows: in canonical order, as `watchstep.Run.rows` gives them.
        configs: the rule configs.
    """
    last = int(rows.step.max()) if len(rows) else -1
    progress = Progress(-1, last, int(rows.time_ns.max()) if len(rows) else 0)
    outcomes = []
    for config in configs:
        verdict = judge(config, RuleMemory(), Block.empty(), rows, progress)
        memory = verdict.memory
        outcomes.append(Outcome(config, verdict.findings, verdict.transitions, memory.health, memory.problem))
    return outcomes
