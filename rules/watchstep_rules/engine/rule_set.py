"""Several rule configs over the rows of one evaluation: each by itself, and then which of them are kept quiet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.inhibition import Told, inhibit
from watchstep_rules.engine.judge import RuleMemory, Verdict, judge_prepared
from watchstep_rules.engine.rule_inputs import Prepared


def judge_set(remembered: Sequence[tuple[RuleConfig, RuleMemory]], rows: Prepared) -> list[Verdict]:
    """Judge with all rule configs of a run; one that fails says so in its health and stops no other.

    Args:
        remembered: each with what the last evaluation left.
        rows: those of this evaluation.

    Returns:
        What each said, in the same order.
    """
    verdicts = [judge_prepared(config, memory, rows) for config, memory in remembered]
    told = [
        Told(config, verdict.memory.alert, verdict.transitions)
        for (config, _), verdict in zip(remembered, verdicts, strict=True)
    ]
    return [
        _quieted(verdict, one)
        for verdict, one in zip(verdicts, inhibit(told, rows.progress.now), strict=True)
    ]


def _quieted(verdict: Verdict, told: Told) -> Verdict:
    if told.memory is verdict.memory.alert and told.transitions is verdict.transitions:
        return verdict
    memory = verdict.memory.model_copy(update={"alert": told.memory})
    return replace(verdict, memory=memory, transitions=list(told.transitions))
