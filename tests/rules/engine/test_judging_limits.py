"""Limits of the evaluation of many rules: time, findings, and whether the process ends."""

from __future__ import annotations

import itertools

import pytest

from tests.sdk.format.blocks import Row, block_of, gradient
from watchstep.format.block import Block
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import JudgingLimits, RuleHealth, RuleMemory, judge_set
from watchstep_rules.engine.rule_inputs import JudgingProgress, RuleInputs

NAN = float("nan")
CONFIGS = [RuleConfig(rule="non_finite_values"), RuleConfig(rule="nan_or_inf")]


def inputs(step: int, value: float = NAN) -> RuleInputs:
    rows = block_of([Row(step, gradient(f"layer{index}", order=index), [value]) for index in range(5)])
    return RuleInputs(Block.empty(), rows, JudgingProgress(-1, step, 0))


def test_findings_beyond_the_limit_are_counted() -> None:
    verdicts = judge_set([(config, RuleMemory()) for config in CONFIGS], inputs(3), JudgingLimits(findings=2))
    assert [(len(verdict.findings), verdict.finding_count) for verdict in verdicts] == [(2, 5), (2, 5)]
    unlimited = judge_set([(config, RuleMemory()) for config in CONFIGS], inputs(3))
    assert [verdict.memory for verdict in verdicts] == [verdict.memory for verdict in unlimited]


def test_rules_after_the_time_limit_keep_their_state_with_an_error() -> None:
    fired = judge_set([(config, RuleMemory()) for config in CONFIGS], inputs(3))
    memories = [verdict.memory for verdict in fired]
    late = judge_set(list(zip(CONFIGS, memories, strict=True)), inputs(4, 1.0), JudgingLimits(seconds=-1.0))
    for verdict, memory in zip(late, memories, strict=True):
        assert verdict.memory.health is RuleHealth.ERROR
        assert "took more than" in verdict.memory.problem
        assert verdict.memory.alert == memory.alert
        assert not verdict.transitions


def test_an_exception_of_the_check_ends_the_evaluation() -> None:
    def ending() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge_set([(CONFIGS[0], RuleMemory())], inputs(3), JudgingLimits(check_running=ending))


def test_time_in_which_the_process_was_suspended_leaves_out_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = itertools.count(0.0, 3600.0)
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    verdicts = judge_set(
        [(config, RuleMemory()) for config in CONFIGS], inputs(3), JudgingLimits(seconds=30.0)
    )
    assert all(verdict.memory.health is not RuleHealth.ERROR for verdict in verdicts)
