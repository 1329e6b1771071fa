"""A run of the earlier schema is judged by its new names after a migration."""

from __future__ import annotations

from pathlib import Path

from tests.sdk.reading.schema_1 import write_run
from watchstep.reading.migration import migrate_run
from watchstep.store.store import Store
from watchstep_rules.backtest.backtest import backtest_run
from watchstep_rules.config.rule_config import RuleConfig


def test_stale_gradients_of_a_migrated_run_are_found(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    migrate_run(Store.open(tmp_path).child("vision/first"), "vision/first")
    (attempt,) = backtest_run(run, [RuleConfig(rule="missing_zero_grad")]).attempts
    (outcome,) = attempt.outcomes
    assert outcome.findings
    assert {finding.tensor for finding in outcome.findings} == {"gradients:stale"}
