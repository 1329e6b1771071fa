from __future__ import annotations

from tests.sdk.blocks import Row, block_of
from tests.services.driving import Driven
from tests.services.recording import LOSS, Recording
from watchstep import documents, segment
from watchstep.documents import EndDocument
from watchstep.layout import SegmentKey, WriterId, end_document
from watchstep.store import Store
from watchstep_rules.config import RuleConfig
from watchstep_services.evaluator.discover import discover
from watchstep_services.evaluator.seals import (
    AttemptProgress,
    SealDecision,
    WriterProgress,
    decide,
    due_ns,
    writers_as_data,
    writers_from_data,
)


def progress(
    world: int, *writers: tuple[int, int], ended: tuple[int, ...] = (), sealed: int = -1
) -> AttemptProgress:
    """Writer i is of rank i: (last step, last heard)."""
    held = {
        f"node/w{rank}": WriterProgress(last, heard, (rank,)) for rank, (last, heard) in enumerate(writers)
    }
    return AttemptProgress(world, 100, held, frozenset(ended), sealed)


def test_a_step_is_sealed_when_every_live_worker_has_passed_it() -> None:
    assert decide(progress(2, (7, 100), (5, 100)), 110, 50) == SealDecision(5, "passed")
    assert decide(progress(2, (7, 100), (5, 100), sealed=5), 110, 50) is None
    assert decide(progress(2, (7, 100), (5, 100), ended=(1,), sealed=5), 110, 50) == SealDecision(7, "passed")
    assert decide(progress(0, (7, 100)), 110, 50) == SealDecision(7, "passed")


def test_a_silent_worker_is_waited_for_until_the_deadline() -> None:
    one_is_silent = progress(2, (7, 140), (5, 100), sealed=5)
    assert decide(one_is_silent, 149, 50) is None
    assert decide(one_is_silent, 150, 50) == SealDecision(7, "deadline")
    assert due_ns(one_is_silent, 50) == 150
    never_heard = progress(3, (7, 140), (7, 140))
    assert decide(never_heard, 149, 50) is None
    assert decide(never_heard, 150, 50) == SealDecision(7, "deadline")
    all_silent = progress(2, (7, 100), (5, 100), sealed=5)
    assert decide(all_silent, 150, 50) == SealDecision(7, "deadline")
    assert due_ns(progress(2, (7, 100), (7, 100), sealed=7), 50) is None


def test_progress_is_kept_as_data() -> None:
    held = progress(2, (7, 140), (5, 100)).writers
    assert writers_from_data(writers_as_data(held)) == held


SEALED = (RuleConfig(rule="vanishing_gradient"),)


def test_two_workers_seal_together_and_a_dead_one_is_passed(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin(world_size=2)
    run_id = driven.register(rules=SEALED)
    driven.announce(run_id, recording.write(0, 0, 7))
    driven.settle(run_id)
    assert driven.seals(run_id) == []

    driven.announce(run_id, recording.write(0, 0, 5, worker=1))
    driven.settle(run_id)
    assert driven.seals(run_id) == [(5, "passed")]

    driven.with_settings(seal_seconds=0.0).settle(run_id)
    assert driven.seals(run_id) == [(5, "passed"), (7, "deadline")]
    assert {row[0]: row[3] for row in driven.memories()}.keys() == {1, 2, 3}


def test_a_worker_that_ended_holds_nothing_up_once_it_is_read(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin(world_size=2)
    run_id = driven.register(rules=SEALED)
    recording.write_all([3, 7])
    recording.write_all([2, 5], worker=1)
    recording.end("failed", 5, worker=1)
    discover(driven.service, run_id)
    driven.settle(run_id)
    assert driven.seals(run_id) == [(7, "passed")]


def of_a_node(recording: Recording, seq: int, *reaches: tuple[int, int, int]) -> SegmentKey:
    """One segment of a node's writer, with the rows of several ranks: (rank, first, last step) of each."""
    first, last = min(reach[1] for reach in reaches), max(reach[2] for reach in reaches)
    key = SegmentKey(WriterId("a1", "node", "node-1"), seq, first, last)
    rows = [
        Row(step, LOSS, [1.0], worker=rank) for rank, start, end in reaches for step in range(start, end + 1)
    ]
    recording.store.put(key.path, segment.encode(block_of(rows)))
    return key


def test_ranks_of_one_writer_are_each_as_far_as_their_own_rows(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin(world_size=2)
    run_id = driven.register(rules=SEALED)
    driven.announce(run_id, of_a_node(recording, 0, (0, 0, 7), (1, 0, 3)))
    driven.settle(run_id)
    assert driven.seals(run_id) == [(3, "passed")]
    driven.announce(run_id, of_a_node(recording, 1, (0, 8, 9)))
    driven.settle(run_id)
    assert driven.seals(run_id) == [(3, "passed")]
    driven.announce(run_id, of_a_node(recording, 2, (0, 10, 12), (1, 4, 8)))
    driven.settle(run_id)
    assert driven.seals(run_id) == [(3, "passed"), (8, "passed")]


def test_of_ranks_of_one_writer_one_ends_before_the_others(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin(world_size=2)
    run_id = driven.register(rules=SEALED)
    of_a_node(recording, 0, (0, 0, 7), (1, 0, 3))
    of_a_node(recording, 1, (0, 8, 9))
    for rank, segments in ((0, 3), (1, 1)):  # of the last one nothing is there
        end = EndDocument(rank, "completed", 3, 1, segments, "node-1")
        recording.store.put(end_document("a1", rank), documents.encode(end))
    discover(driven.service, run_id)
    driven.settle(run_id)
    assert driven.seals(run_id) == [(9, "passed")]
    assert driven.segments(run_id) == {("node-1", 0): "read", ("node-1", 1): "read"}
    driven.with_settings(gap_seconds=0.0).settle(run_id)
    assert driven.segments(run_id)["node-1", 2] == "missing"


def test_a_world_of_any_size_costs_nothing() -> None:
    told = progress(2**62, (7, 140), (7, 140), sealed=5)
    assert decide(told, 149, 50) is None
    assert decide(told, 150, 50) == SealDecision(7, "deadline")
    assert due_ns(told, 50) == 150


def test_an_ended_rank_that_was_never_heard_holds_nothing_up() -> None:
    assert decide(progress(3, (7, 100), (7, 100), ended=(2,)), 110, 50) == SealDecision(7, "passed")
    assert decide(progress(4, (7, 100), (7, 100), ended=(2,)), 110, 50) is None
