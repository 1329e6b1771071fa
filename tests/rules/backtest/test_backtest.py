"""Backtests without a service: rows by their steps, in parts; and journals written by hand."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.rules.runs import LAST, segments
from watchstep.errors import NotFoundError
from watchstep.format import documents, journal, layout, segment
from watchstep.format.block import Block, concatenate
from watchstep.format.documents import RunDocument
from watchstep.format.journal import JournalEvaluation, JournalPart, JournalSegment, RankRows
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.reading.compaction import compact
from watchstep.reading.run import open_run
from watchstep.store.store import Store
from watchstep_rules.backtest import replay
from watchstep_rules.backtest.backtest import (
    JudgingOrder,
    ReplayOutcome,
    backtest,
    backtest_run,
    backtest_sets,
)
from watchstep_rules.config.rule_config import RuleConfig

CONFIGS = (
    RuleConfig(rule="non_finite_values", params={"allow_infinity_in": []}),
    RuleConfig(rule="exploding_gradient", params={"growth": 1.5, "warmup": 3, "window": 3}),
    RuleConfig(rule="vanishing_gradient", params={"threshold": 10.0, "relative": 0.9}),
)
NODE = WriterId("a1", "node", "node-x")


def run_store(folder: Path) -> Store:
    store = Store.open(folder, create=True).child("vision/first/")
    store.create(layout.RUN_DOCUMENT, documents.encode(RunDocument("vision", "first", 1)))
    return store


def put(store: Store, writer: WriterId, seq: int, block: Block) -> SegmentKey:
    key = SegmentKey(writer, seq, int(block.step.min()), int(block.step.max()))
    store.put(key.path, segment.encode(block))
    return key


def recorded(store: Store, seed: int) -> None:
    """Two workers' segments."""
    for worker in (0, 1):
        for seq, block in enumerate(segments(Random(seed + worker), worker, frozenset())):
            put(store, WriterId("a1", "node", f"w{worker}"), seq, block)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [1, 40, 500_000])
def test_a_run_read_in_parts_has_the_findings_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, rows: int
) -> None:
    monkeypatch.setattr(replay, "ROWS", rows)
    recorded(run_store(tmp_path), seed)
    run = open_run(tmp_path / "vision" / "first")
    (attempt,) = backtest_run(run, CONFIGS).attempts
    result = backtest(run.rows("a1"), CONFIGS)
    assert any(outcome.findings for outcome in result)
    assert attempt.outcomes == result
    assert attempt.order is JudgingOrder.STEPS
    assert attempt.notes == (replay.NO_JOURNAL,)


def test_sets_are_judged_by_themselves(tmp_path: Path) -> None:
    recorded(run_store(tmp_path), 1)
    location = tmp_path / "vision" / "first"
    loose = CONFIGS[1].model_copy(update={"params": {"growth": 1e30}})
    first, second = backtest_sets(location, [CONFIGS, [loose]])
    assert first == backtest_run(location, CONFIGS)
    assert [outcome.findings for attempt in second.attempts for outcome in attempt.outcomes] == [[]]


def test_findings_beyond_the_first_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(run_store(tmp_path), 1)
    location = tmp_path / "vision" / "first"
    (whole,) = backtest_run(location, CONFIGS[:1]).attempts
    monkeypatch.setattr("watchstep_rules.backtest.replay.FINDINGS_KEPT", 2)
    (cut,) = backtest_run(location, CONFIGS[:1]).attempts
    everything, limited = whole.outcomes[0], cut.outcomes[0]
    assert limited.findings == everything.findings[:2]
    assert limited.found == everything.found == len(everything.findings) > 2


def ranks_of(block: Block) -> tuple[RankRows, ...]:
    found = []
    for rank in sorted({int(worker) for worker in block.worker}):
        steps = block.step[block.worker == rank]
        found.append(RankRows(rank, int(steps.min()), int(steps.max()), len(steps)))
    return tuple(found)


def ranks_of_one_writer(store: Store, *, with_ranks: bool = True) -> None:
    """Both ranks' rows in each segment of one writer, each at steps of its own; judged in two evaluations."""
    queues = [segments(Random(7 + worker), worker, frozenset()) for worker in (0, 1)]
    length = min(map(len, queues))
    blocks = [concatenate([queue.pop(0) for queue in queues]) for _ in range(length)]
    rest = [block for queue in queues for block in queue]
    blocks += [concatenate(rest)] if rest else []
    journaled = [
        JournalSegment(put(store, NODE, seq, block), ranks_of(block) if with_ranks else None)
        for seq, block in enumerate(blocks)
    ]
    evaluations = (
        JournalEvaluation(0, 5, 3, False, tuple(journaled[:1])),
        JournalEvaluation(1, 9, LAST, False, tuple(journaled[1:])),
    )
    store.create(layout.journal_part("a1", 0), journal.encode(JournalPart("a1", 0, evaluations)))


def replayed(folder: Path) -> tuple[JudgingOrder, tuple[str, ...], list[ReplayOutcome]]:
    (attempt,) = backtest_run(folder / "vision" / "first", CONFIGS).attempts
    return attempt.order, attempt.notes, attempt.outcomes


@pytest.mark.parametrize("rows", [1, 500_000])
def test_ranks_that_one_writer_wrote_for_are_found_after_a_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(replay, "ROWS", rows)
    ranks_of_one_writer(run_store(tmp_path))
    before = replayed(tmp_path)
    assert before[:2] == (JudgingOrder.JOURNAL, ())
    compact(tmp_path / "vision" / "first", delete_after=0)
    assert replayed(tmp_path) == before


def test_without_ranks_in_the_journal_the_order_is_lost_with_the_segments(tmp_path: Path) -> None:
    ranks_of_one_writer(run_store(tmp_path), with_ranks=False)
    assert replayed(tmp_path)[0] is JudgingOrder.JOURNAL
    compact(tmp_path / "vision" / "first", delete_after=0)
    order, notes, _ = replayed(tmp_path)
    assert order is JudgingOrder.STEPS
    assert notes[0].endswith("is missing; rows are evaluated in the order of their steps")


def test_a_run_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="not found"):
        backtest_run(tmp_path / "vision" / "first", CONFIGS)
