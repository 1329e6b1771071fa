"""Runs of earlier schemas are judged after a migration: by their new names, and with the same findings."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.rules.runs import segments
from tests.sdk.reading.schema_1 import write_run
from tests.sdk.reading.schema_2 import as_schema_2
from watchstep.format import documents, journal, segment
from watchstep.format.documents import RunDocument
from watchstep.format.journal import JournalEvaluation, JournalPart, JournalSegment, RankRows
from watchstep.format.layout import RUN_DOCUMENT, SegmentKey, WriterId
from watchstep.reading.compaction import compact
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


def recorded(folder: Path) -> Path:
    """Two workers' segments, and the journal of their evaluation."""
    store = Store.open(folder, create=True).child("vision/first/")
    store.put(RUN_DOCUMENT, documents.encode(RunDocument("vision", "first", 1)))
    evaluations: list[JournalEvaluation] = []
    for worker in (0, 1):
        for seq, block in enumerate(segments(Random(worker), worker, frozenset())):
            steps = int(block.step.min()), int(block.step.max())
            key = SegmentKey(WriterId("a1", "node", f"w{worker}"), seq, *steps)
            store.put(key.path, segment.encode(block))
            entry = JournalSegment(key, (RankRows(worker, *steps, len(block)),))
            evaluations.append(
                JournalEvaluation(len(evaluations), 10 + len(evaluations), -1, False, (entry,))
            )
    part = JournalPart("a1", 0, tuple(evaluations))
    store.put("journal/a1/0.json", journal.encode(part))
    return folder / "vision" / "first"


@pytest.mark.parametrize("compacted", [False, True])
def test_a_backtest_of_a_migrated_run_has_the_same_findings(tmp_path: Path, compacted: bool) -> None:
    configs = [
        RuleConfig(rule="non_finite_values", params={"allow_infinity_in": []}),
        RuleConfig(rule="vanishing_gradient", params={"threshold": 10.0, "relative": 0.9}),
    ]
    run = recorded(tmp_path)
    due = backtest_run(run, configs)
    assert any(outcome.findings for attempt in due.attempts for outcome in attempt.outcomes)
    if compacted:
        compact(run)
    as_schema_2(run)
    done = migrate_run(Store.open(tmp_path).child("vision/first"), "vision/first", silent_seconds=0)
    assert done.segments > 2
    assert done.damaged == {}
    assert backtest_run(run, configs) == due
    compact(run, delete_after=0)
    judged = backtest_run(run, configs)
    assert [attempt.outcomes for attempt in judged.attempts] == [attempt.outcomes for attempt in due.attempts]
