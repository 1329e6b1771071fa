from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from tests.sdk.format.blocks import Row, block_of
from tests.services.driving import Driven
from tests.services.recording import LOSS, Recording, nan_from
from watchstep.format import documents, segment
from watchstep.format.documents import EndDocument
from watchstep.format.layout import SegmentKey, WriterId, end_document
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.models import Attempt
from watchstep_services.evaluation import watermark as watermarks
from watchstep_services.evaluation.collect import spans_of_ranks
from watchstep_services.evaluation.watermark import (
    AttemptProgress,
    RankProgress,
    WatermarkAdvance,
    decide,
    due_ns,
    ranks_as_data,
    ranks_from_data,
)
from watchstep_services.runs.attempts import MOST_RANKS
from watchstep_services.runs.discovery import discover


def progress(
    world: int, *ranks: tuple[int, int], ended: tuple[int, ...] = (), watermark: int = -1
) -> AttemptProgress:
    """Of each rank: (last step, last heard)."""
    held = {rank: RankProgress(last, heard) for rank, (last, heard) in enumerate(ranks)}
    return AttemptProgress(world, 100, held, frozenset(ended), watermark)


def test_the_watermark_advances_when_every_live_worker_has_passed_it() -> None:
    assert decide(progress(2, (7, 100), (5, 100)), 110, 50) == WatermarkAdvance(5, "passed")
    assert decide(progress(2, (7, 100), (5, 100), watermark=5), 110, 50) is None
    assert decide(progress(2, (7, 100), (5, 100), ended=(1,), watermark=5), 110, 50) == WatermarkAdvance(
        7, "passed"
    )
    assert decide(progress(0, (7, 100)), 110, 50) == WatermarkAdvance(7, "passed")


def test_a_silent_worker_is_waited_for_until_the_deadline() -> None:
    one_is_silent = progress(2, (7, 140), (5, 100), watermark=5)
    assert decide(one_is_silent, 149, 50) is None
    assert decide(one_is_silent, 150, 50) == WatermarkAdvance(7, "deadline")
    assert due_ns(one_is_silent, 50) == 150
    never_heard = progress(3, (7, 140), (7, 140))
    assert decide(never_heard, 149, 50) is None
    assert decide(never_heard, 150, 50) == WatermarkAdvance(7, "deadline")
    all_silent = progress(2, (7, 100), (5, 100), watermark=5)
    assert decide(all_silent, 150, 50) == WatermarkAdvance(7, "deadline")
    assert due_ns(progress(2, (7, 100), (7, 100), watermark=7), 50) is None
    in_the_future = progress(2, (7, 150), (5, 200), watermark=5)
    assert decide(in_the_future, 150, 50) is None
    assert decide(in_the_future, 149, 50) == WatermarkAdvance(7, "deadline")


def test_progress_is_kept_as_data() -> None:
    held = progress(2, (7, 140), (5, 100)).ranks
    assert ranks_from_data(ranks_as_data(held)) == held


SEALED = (RuleConfig(rule="vanishing_gradient"),)


def test_two_workers_seal_together_and_a_dead_one_is_passed(driven: Driven) -> None:
    recording, run_id = driven.record(rules=SEALED, world_size=2)
    assert driven.watermarks(run_id) == []

    driven.judge(run_id, recording.write(0, 0, 5, worker=1))
    assert driven.watermarks(run_id) == [(5, "passed")]

    driven.with_settings(allowed_lateness_seconds=0.0).settle(run_id)
    assert driven.watermarks(run_id) == [(5, "passed"), (7, "deadline")]
    assert {row[0]: row[3] for row in driven.memories()}.keys() == {1, 2, 3}


def test_a_worker_that_ended_holds_nothing_up_once_it_is_read(driven: Driven) -> None:
    recording, run_id = driven.begin(rules=SEALED, world_size=2)
    recording.write_all([3, 7])
    recording.write_all([2, 5], worker=1)
    recording.end("failed", 5, worker=1)
    driven.discover(run_id)
    assert driven.watermarks(run_id) == [(7, "passed")]


def of_a_node(recording: Recording, seq: int, *reaches: tuple[int, int, int]) -> SegmentKey:
    """One segment of a node's writer, with the rows of several ranks: (rank, first, last step) of each."""
    first, last = min(reach[1] for reach in reaches), max(reach[2] for reach in reaches)
    key = SegmentKey(WriterId("a1", "node", "node-1"), seq, first, last)
    rows = [
        Row(step, LOSS, [1.0], worker=rank) for rank, start, end in reaches for step in range(start, end + 1)
    ]
    recording.store.put(key.path, segment.encode(block_of(rows)))
    return key


def test_ranks_of_one_writer_are_each_as_far_as_their_own_rows(driven: Driven) -> None:
    recording, run_id = driven.begin(rules=SEALED, world_size=2)
    driven.judge(run_id, of_a_node(recording, 0, (0, 0, 7), (1, 0, 3)))
    assert driven.watermarks(run_id) == [(3, "passed")]
    driven.judge(run_id, of_a_node(recording, 1, (0, 8, 9)))
    assert driven.watermarks(run_id) == [(3, "passed")]
    driven.judge(run_id, of_a_node(recording, 2, (0, 10, 12), (1, 4, 8)))
    assert driven.watermarks(run_id) == [(3, "passed"), (8, "passed")]


def test_progress_is_of_ranks_however_many_writers_they_have(driven: Driven) -> None:
    recording, run_id = driven.begin(rules=SEALED)
    for number in range(3):
        key = SegmentKey(WriterId("a1", "node", f"w0-{number}"), 0, 4 * number, 4 * number + 3)
        rows = [Row(step, LOSS, [1.0]) for step in range(key.first, key.last + 1)]
        recording.store.put(key.path, segment.encode(block_of(rows)))
        driven.judge(run_id, key)
    with driven.service.database.read() as session:
        (row,) = session.execute(select(Attempt).filter_by(run_id=run_id)).scalars()
    assert {rank: last for rank, (last, _) in row.ranks.items()} == {"0": 11}
    assert row.watermark == 11


def test_a_worker_whose_announcements_are_lost_is_not_silent(driven: Driven) -> None:
    recording, run_id = driven.begin(rules=(RuleConfig(rule="non_finite_values"),), world_size=2)
    discover(driven.service, run_id)
    driven.announce(run_id, recording.write(0, 0, 7))
    recording.write(0, 0, 7, nan_from(4), worker=1)  # nobody announces it
    hasty = driven.with_settings(listing_seconds=3600.0, allowed_lateness_seconds=0.0)
    hasty.evaluate(run_id)
    hasty.evaluate(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read", ("w1", 0): "read"}
    assert driven.alerts(run_id)["non_finite_values"][0] == "firing"
    assert driven.watermarks(run_id)[0][0] == 7


def test_the_last_deadline_of_a_silent_worker_is_the_one_that_a_listing_follows() -> None:
    silent = progress(2, (7, 140), (5, 100), watermark=5)
    assert watermarks.expired_ns(silent, 160, 50) == 150
    assert watermarks.expired_ns(silent, 1000, 50) == 190
    assert watermarks.expired_ns(silent, 120, 50) == 0
    assert watermarks.expired_ns(silent, 40, 50) == 40  # the clock was set back


class Counted(np.ndarray[Any, np.dtype[Any]]):
    """An array that counts the operations over all of it."""

    operations = 0

    def __array_ufunc__(self, ufunc: Any, method: Any, *inputs: Any, **options: Any) -> Any:
        Counted.operations += 1
        plain = [given.view(np.ndarray) if isinstance(given, Counted) else given for given in inputs]
        return getattr(ufunc, method)(*plain, **options)


def test_a_segment_of_very_many_ranks_is_grouped_once() -> None:
    ranks = 300
    block = block_of(
        [Row(step, LOSS, [1.0], worker=rank) for rank in range(ranks) for step in (rank, rank + 2)]
    )
    shuffled = block.take(np.random.default_rng(0).permutation(len(block)))
    counted = dataclasses.replace(
        shuffled, worker=shuffled.worker.view(Counted), step=shuffled.step.view(Counted)
    )
    Counted.operations = 0
    assert spans_of_ranks(counted) == [[rank, rank, rank + 2, 2] for rank in range(ranks)]
    assert Counted.operations < 20
    assert spans_of_ranks(block.take(np.zeros(0, np.int64))) == []


def test_what_was_heard_of_very_many_ranks_is_taken_in_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[AttemptProgress] = []

    def replaced(before: AttemptProgress, **changes: Any) -> AttemptProgress:
        copies.append(before)
        return dataclasses.replace(before, **changes)

    monkeypatch.setattr(watermarks, "replace", replaced)
    segments = [(rank % 300, RankProgress(rank, 50 + rank)) for rank in range(600)]
    after = progress(300).with_segments(segments)
    assert len(copies) == 1
    assert after.first_seen_ns == 50
    assert after.ranks == {rank: RankProgress(rank + 300, rank + 350) for rank in range(300)}


def test_a_segment_of_a_rank_that_is_not_followed_counts_as_damaged(driven: Driven) -> None:
    recording, run_id = driven.begin(rules=SEALED)
    driven.announce(run_id, of_a_node(recording, 0, (0, 0, 7), (MOST_RANKS, 0, 3)))
    driven.judge(run_id, of_a_node(recording, 1, (0, 8, 9), (MOST_RANKS - 1, 8, 9)))
    assert set(driven.segments(run_id).values()) == {"corrupt", "read"}
    assert f"contains rank {MOST_RANKS}" in driven.run(run_id).health["last_corrupt"]


@pytest.mark.ci
def test_of_ranks_of_one_writer_one_ends_before_the_others(driven: Driven) -> None:
    recording, run_id = driven.begin(rules=SEALED, world_size=2)
    of_a_node(recording, 0, (0, 0, 7), (1, 0, 3))
    of_a_node(recording, 1, (0, 8, 9))
    for rank, segments in ((0, 3), (1, 1)):  # of the last one nothing is there
        end = EndDocument(rank, "completed", 3, 1, segments, "node-1")
        recording.store.put(end_document("a1", rank), documents.encode(end))
    driven.discover(run_id)
    assert driven.watermarks(run_id) == [(9, "passed")]
    assert driven.segments(run_id) == {("node-1", 0): "read", ("node-1", 1): "read"}
    driven.with_settings(gap_seconds=0.0).settle(run_id)
    assert driven.segments(run_id)["node-1", 2] == "missing"


def test_a_world_of_any_size_costs_nothing() -> None:
    told = progress(2**62, (7, 140), (7, 140), watermark=5)
    assert decide(told, 149, 50) is None
    assert decide(told, 150, 50) == WatermarkAdvance(7, "deadline")
    assert due_ns(told, 50) == 150


def test_an_ended_rank_that_was_never_heard_holds_nothing_up() -> None:
    assert decide(progress(3, (7, 100), (7, 100), ended=(2,)), 110, 50) == WatermarkAdvance(7, "passed")
    assert decide(progress(4, (7, 100), (7, 100), ended=(2,)), 110, 50) is None


def test_no_more_rows_wait_than_memory_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is heard and stays at step 0 would keep the rows of all others in memory for good."""
    monkeypatch.setattr(watermarks, "MOST_ROWS", 100)
    steps = np.repeat(np.arange(60), 2)
    assert watermarks.bounded(None, 20, steps) is None
    assert watermarks.bounded(WatermarkAdvance(20, "passed"), -1, steps) == WatermarkAdvance(20, "passed")
    assert watermarks.bounded(None, -1, np.arange(100)) is None
    decision = watermarks.bounded(None, -1, steps)
    assert decision is not None
    assert decision.cause == "rows"
    assert (steps > decision.step).sum() <= 50
    of_one_step = np.full(1000, 7)
    assert watermarks.bounded(None, -1, of_one_step) == WatermarkAdvance(7, "rows")


def test_a_rank_that_stays_behind_holds_up_so_many_rows_only(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watermarks, "MOST_ROWS", 60)
    recording, run_id = driven.begin(world_size=2)
    for seq in range(12):  # each of ten steps with three rows
        driven.announce(run_id, recording.write(seq, 10 * seq, 10 * seq + 9))
        driven.judge(run_id, recording.write(seq, 0, 0, worker=1))
    (_, _, history), *_ = driven.service.histories._entries.values()
    assert len(history.block) < 150
