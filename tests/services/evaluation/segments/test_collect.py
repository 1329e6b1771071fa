"""The plan of an evaluation, and what it reads: new rows, earlier rows, and histograms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import traced_memory
from tests.services.driving import Driven, make_service
from tests.services.recording import Recording, Value, exploding_from, healthy, nan_from
from watchstep.errors import ConfigError, FormatError, StoreError
from watchstep.format import ipc, segment
from watchstep.format.block import Block
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.format.segment_checks import check_histograms
from watchstep.format.statistics import Histograms
from watchstep.reading.compaction import compact
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.core.failpoints import listening
from watchstep_services.db.engine import Database
from watchstep_services.db.models import RunRow
from watchstep_services.evaluation import collect, context
from watchstep_services.evaluation.inbox import GapTimeout, InboxEntry, make_plan
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.rule_configs import put_one

WRITERS = [WriterId("a1", "node", name) for name in ("w0", "w1")]
NOW = 1000
ENDS = [4, 9, 14, 19, 24]
LATE = exploding_from(27)
MakeDatabase = Callable[[int], Database]
HEADROOM = RuleConfig(rule="number_format_headroom", params={"number_format": "fp16"})


@pytest.fixture
def recording(folder_store: Store) -> Recording:
    return Recording(folder_store).begin()


def test_a_gap_is_waited_for(driven: Driven, recording: Recording) -> None:
    run_id = driven.register()
    driven.judge(run_id, recording.write(0, 0, 3), recording.write(2, 8, 11))
    assert driven.segments(run_id) == {("w0", 0): "read", ("w0", 2): "announced"}
    assert driven.run(run_id).due_ns is not None

    driven.judge(run_id, recording.write(1, 4, 7, nan_from(6)))
    assert set(driven.segments(run_id).values()) == {"read"}
    # It fires at step 6, and the steps behind the gap, which are judged after it, resolve it.
    assert driven.alerts(run_id)["non_finite_values"][:2] == ("resolved", 8)


def test_a_lost_announcement_leaves_no_gap(driven: Driven, recording: Recording) -> None:
    run_id = driven.register()
    recording.write_all([3, 7, 11])
    first, _, third = recording.written["w0"]
    driven.judge(run_id, first, third)
    assert set(driven.segments(run_id).values()) == {"read"}
    assert len(driven.segments(run_id)) == 3


def test_a_missing_segment_is_passed_and_judged_if_it_still_comes(
    driven: Driven, recording: Recording
) -> None:
    patient, run_id = driven, driven.register()
    driven = driven.with_settings(gap_seconds=0.0)
    driven.judge(run_id, recording.write(0, 0, 3), recording.write(2, 8, 11))
    assert driven.segments(run_id) == {("w0", 0): "read", ("w0", 1): "missing", ("w0", 2): "read"}
    assert driven.run(run_id).health["missing_segments"] == 1

    late = recording.write(1, 4, 7, nan_from(6))
    patient.judge(run_id, late)
    assert set(driven.segments(run_id).values()) == {"read"}
    assert driven.alerts(run_id)["non_finite_values"][1] == 6
    ticks = driven.run(run_id).ticks

    patient.judge(run_id, late)
    assert driven.run(run_id).ticks == ticks
    assert driven.run(run_id).cursor == '{"a1/node/w0":3}'


def test_segments_that_were_deleted_with_an_earlier_run_are_not_waited_for(
    driven: Driven, recording: Recording
) -> None:
    """A recorder goes on after its lost run was deleted, and has to be stopped before it ends."""
    run_id = driven.register()
    driven.judge(run_id, recording.write(5, 20, 23, nan_from(22)))
    assert driven.segments(run_id)["w0", 5] == "read"
    assert driven.alerts(run_id)["non_finite_values"][1] == 22
    assert driven.run(run_id).health["missing_segments"] == 5


def test_a_corrupt_segment_is_told_and_passed(driven_sqlite: Driven, recording: Recording) -> None:
    run_id = driven_sqlite.register()
    keys = [recording.write(0, 0, 3), recording.write(1, 4, 7), recording.write(2, 8, 11, nan_from(9))]
    recording.store.put(keys[1].path, recording.store.get(keys[1].path)[:-40])
    driven_sqlite.judge(run_id, *keys)
    assert driven_sqlite.segments(run_id) == {("w0", 0): "read", ("w0", 1): "corrupt", ("w0", 2): "read"}
    assert driven_sqlite.run(run_id).health["corrupt_segments"] == 1
    assert "0000000001" in driven_sqlite.run(run_id).health["last_corrupt"]
    assert driven_sqlite.alerts(run_id)["non_finite_values"][0] == "firing"


def test_a_segment_is_read_again_after_memory_was_short(
    driven_sqlite: Driven, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = driven_sqlite.register()
    driven_sqlite.announce(run_id, recording.write(0, 0, 3))

    def short(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(ipc, "column_values", short)
        with pytest.raises(StoreError, match="out of memory"):
            driven_sqlite.settle(run_id)
    assert driven_sqlite.segments(run_id) == {("w0", 0): "announced"}
    driven_sqlite.settle(run_id)
    assert driven_sqlite.segments(run_id) == {("w0", 0): "read"}


def test_a_segment_with_steps_that_its_name_does_not_say_is_corrupt(
    driven_sqlite: Driven, recording: Recording
) -> None:
    run_id = driven_sqlite.register()
    key = recording.key(0, 0, 3)
    recording.store.put(key.path, recording.encoded(4, 7))
    driven_sqlite.judge(run_id, key)
    assert driven_sqlite.segments(run_id) == {("w0", 0): "corrupt"}


def test_an_announcement_of_what_is_not_there_moves_nothing(driven: Driven, recording: Recording) -> None:
    run_id = driven.register()
    driven.judge(run_id, recording.key(0, 0, 3), recording.key(10**9, 0, 3))
    assert driven.run(run_id).cursor == "{}"
    hasty = driven.with_settings(gap_seconds=0.0)
    hasty.settle(run_id)
    hasty.settle(run_id)
    assert driven.segments(run_id) == {}
    assert driven.run(run_id).cursor == "{}"

    driven.judge(run_id, recording.write(0, 0, 3))
    assert driven.segments(run_id) == {("w0", 0): "read"}


def test_an_announcement_with_wrong_steps_is_corrected_by_the_store(
    driven: Driven, recording: Recording
) -> None:
    run_id = driven.register()
    true = recording.write(0, 0, 3)
    driven.judge(run_id, SegmentKey(true.writer, 0, 0, 99))
    driven.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read"}
    assert driven.run(run_id).last_step == 3


def test_a_writer_that_ended_with_fewer_segments_than_it_wrote(driven: Driven, recording: Recording) -> None:
    run_id = driven.register()
    recording.write_all([3, 7])
    first, second = recording.written["w0"]
    recording.end(last_step=7)
    recording.store.delete(second.path)
    driven.announce(run_id, first)
    hasty = driven.with_settings(gap_seconds=0.0)
    assert discover(hasty.service, run_id).fresh
    hasty.settle(run_id)
    hasty.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read", ("w0", 1): "missing"}


def test_two_attempts_are_judged_apart(driven: Driven, recording: Recording) -> None:
    run_id = driven.register()
    again = driven.recording(attempt="a2").begin()
    driven.judge(run_id, recording.write(0, 0, 7, nan_from(4)), again.write(0, 4, 9, healthy))
    assert driven.run(run_id).attempt == "a2"
    assert driven.run(run_id).cursor == '{"a1/node/w0":1,"a2/node/w0":1}'
    assert [(row[1], row[3]) for row in driven.memories()] == [("a1", 4), ("a2", 0), ("a1", 0), ("a2", 0)]


def test_discovery_finds_what_nobody_announced(driven: Driven, recording: Recording) -> None:
    run_id = driven.register()
    recording.write_all([3, 7], nan_from(5))
    recording.end(last_step=7)
    recording.store.put("stats/rubbish.txt", b"")
    assert discover(driven.service, run_id).fresh
    driven.settle(run_id)
    assert driven.alerts(run_id)["non_finite_values"][0] == "firing"
    assert list(driven.run(run_id).health["documents"]) == ["stats/rubbish.txt"]
    assert not discover(driven.service, run_id).fresh


def test_an_earlier_attempt_that_is_uploaded_late_is_not_the_newest(driven: Driven) -> None:
    later = driven.recording(attempt="later").begin(started_ns=200)
    run_id = driven.register()
    later.write_all([3, 7])
    driven.discover(run_id)
    earlier = driven.recording(attempt="earlier").begin(started_ns=100, late=True)
    earlier.write_all([3])
    driven.discover(run_id)
    assert driven.run(run_id).attempt == "later"
    assert set(driven.segments(run_id).values()) == {"read"}


def test_an_attempt_is_the_newest_though_the_clock_of_its_machine_is_behind(driven: Driven) -> None:
    first = driven.recording(attempt="first").begin(started_ns=200)
    run_id = driven.register()
    first.write_all([3, 7])
    first.end("completed", last_step=7)
    driven.discover(run_id)
    driven.register()  # by the second process, which makes a listing due
    driven.recording(attempt="second").begin(started_ns=100).write_all([11])
    driven.discover(run_id)
    assert (driven.run(run_id).attempt, driven.run(run_id).state) == ("second", "running")


@pytest.mark.ci
def test_an_evaluation_reads_as_much_as_fits_into_memory(driven: Driven, recording: Recording) -> None:
    run_id = driven.register()
    keys = [recording.write(number, 200 * number, 200 * number + 199) for number in range(4)]
    compressed = sum(len(recording.store.get(key.path)) for key in keys)
    driven = driven.with_settings(max_bytes=compressed + 1)
    driven.announce(run_id, *keys)
    driven.evaluate(run_id)
    assert "announced" in driven.segments(run_id).values()
    driven.settle(run_id)
    assert set(driven.segments(run_id).values()) == {"read"}


def test_a_document_that_is_too_large_is_a_problem_of_its_own(
    driven_sqlite: Driven, recording: Recording
) -> None:
    run_id = driven_sqlite.register()
    recording.store.put("attempts/a0.json", b" " * (5 * 1024 * 1024))
    driven_sqlite.announce(run_id, recording.write(0, 0, 3))
    driven_sqlite.discover(run_id)
    assert driven_sqlite.segments(run_id) == {("w0", 0): "read"}


def test_the_end_of_a_writer_is_given_up_while_others_go_on(driven: Driven) -> None:
    recording, run_id = driven.begin(world_size=2)
    driven.judge(run_id, recording.write(0, 0, 3), recording.write(0, 0, 3, worker=1))
    lost = recording.write(1, 4, 7, worker=1)
    recording.end(last_step=7, worker=1)
    recording.store.delete(lost.path)
    discover(driven.service, run_id)
    driven.announce(run_id, recording.write(1, 4, 7))
    hasty = driven.with_settings(gap_seconds=0.0)
    hasty.settle(run_id)
    assert driven.segments(run_id)["w1", 1] == "missing"
    assert driven.run(run_id).health["missing_segments"] == 1
    assert driven.watermarks(run_id)[-1] == (7, "passed")


def test_an_answer_that_was_cut_short_once_costs_no_segment(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run_id = driven_sqlite.begin()
    driven_sqlite.announce(run_id, recording.write(0, 0, 9, nan_from(5)))
    answers: list[SegmentKey] = []
    whole = collect.fetch

    def once_cut(run_store: Store, key: SegmentKey) -> bytes:
        data = whole(run_store, key)
        answers.append(key)
        return data[: len(data) // 2] if len(answers) == 1 else data

    monkeypatch.setattr(collect, "fetch", once_cut)
    driven_sqlite.settle(run_id)
    assert set(driven_sqlite.segments(run_id).values()) == {"read"}
    assert driven_sqlite.alerts(run_id)


def entry(writer: int, seq: int, found_ns: int) -> InboxEntry:
    return InboxEntry(10 * writer + seq, SegmentKey(WRITERS[writer], seq, seq, seq), found_ns)


@pytest.mark.ci
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(0, NOW)), unique_by=lambda row: row[:2]
    ),
    st.integers(0, 3),
    st.booleans(),
)
def test_what_is_read_is_contiguous_unless_a_gap_is_over(
    found: list[tuple[int, int, int]], start: int, listed: bool
) -> None:
    cursor = {WRITERS[0]: start}
    plan = make_plan(cursor, [entry(*row) for row in found], {}, GapTimeout(NOW, 500, listed))
    for writer in WRITERS:
        following = cursor.get(writer, 0)
        for held in plan.readable:
            if held.key.writer != writer:
                continue
            if held.key.seq > following:
                assert listed
                is_new = following == 0 and writer not in cursor
                assert is_new or held.found_ns <= NOW - 500
            following = max(following, held.key.seq + 1)
    read = {held.key for held in plan.readable}
    for gap in plan.waiting:
        assert not any(key.writer == gap.writer and key.seq >= gap.start for key in read)
    assert len(plan.readable) == len(read)


def test_a_segment_follows_its_writers_earlier_ones() -> None:
    plan = make_plan(
        {}, [entry(0, 0, 9), entry(0, 1, 3), entry(1, 0, 5)], {}, GapTimeout(NOW, 500, listed=False)
    )
    assert [(held.key.writer.writer, held.key.seq) for held in plan.readable] == [
        ("w1", 0),
        ("w0", 0),
        ("w0", 1),
    ]


def judged(driven: Driven) -> tuple[Recording, int]:
    """A run of which five segments were judged."""
    recording, run_id = driven.begin()
    recording.write_all(ENDS, LATE)
    driven.judge(run_id, *recording.written["w0"])
    return recording, run_id


def nothing(recording: Recording) -> None:
    del recording


def compacted(recording: Recording) -> None:
    assert compact(recording.store, delete_after=0.0).deleted == len(ENDS)


def compacted_and_damaged(recording: Recording) -> None:
    compact(recording.store)
    for key in recording.written["w0"]:
        recording.store.put(key.path, b"damaged")


def late_result(driven: Driven, change: Callable[[Recording], None]) -> tuple[Any, ...]:
    """What is known once a late segment was judged by another process, after something changed the store."""
    recording, run_id = judged(driven)
    change(recording)
    cold = driven.restarted()
    cold.judge(run_id, recording.write(len(ENDS), 25, 31, LATE))
    assert set(cold.segments(run_id).values()) == {"read"}
    kinds = [kind for kind in cold.event_types(run_id) if kind.startswith("rule.")]
    return cold.findings(), cold.memories(), cold.alerts(run_id), cold.run(run_id).health, kinds


@pytest.mark.parametrize("change", [compacted, compacted_and_damaged])
def test_a_compacted_run_gives_the_context_of_its_segments(
    tmp_path: Path, sqlite_factory: MakeDatabase, change: Callable[[Recording], None]
) -> None:
    results = []
    for number, change_store in enumerate((nothing, change)):
        store = Store.open(tmp_path / str(number), create=True)
        results.append(late_result(Driven(make_service(sqlite_factory(number), store)), change_store))
    assert results[0] == results[1]
    findings, _, alerts, health, _ = results[0]
    assert findings
    assert alerts["exploding_gradient"][0] == "firing"
    assert health == {}


@pytest.mark.parametrize("damage", ["deleted", "damaged", "too large"])
def test_a_run_is_judged_without_context_that_is_lost(
    driven_sqlite: Driven, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run_id = judged(driven_sqlite)
    if damage == "too large":
        compact(recording.store)
        monkeypatch.setattr(context, "_MEGABYTES", 0.001)
    for key in recording.written["w0"]:
        if damage == "deleted":
            recording.store.delete(key.path)
        else:
            recording.store.put(key.path, b"damaged")
    cold = driven_sqlite.restarted()
    cold.judge(run_id, recording.write(len(ENDS), 25, 31, LATE))
    assert cold.segments(run_id)["w0", len(ENDS)] == "read"
    health = cold.run(run_id).health
    assert health["lost_context"] >= 1
    assert recording.written["w0"][4].path in health["last_lost_context"]
    (error,) = cold.events(run_id, "rule.error")
    assert error["data"]["name"] == "exploding_gradient"
    assert "earlier rows" in error["data"]["problem"]

    cold.announce(run_id, recording.write(len(ENDS) + 1, 32, 40, LATE))
    cold.restarted().settle(run_id)
    assert cold.run(run_id).health["lost_context"] == health["lost_context"]
    assert cold.event_types(run_id).count("rule.ok") == 1


def test_a_rule_that_waits_for_all_workers_reports_steps_that_it_could_not_judge(
    sqlite: Database, folder_store: Store
) -> None:
    waits = RuleConfig(rule="loss_not_decreasing", name="waits")
    driven = Driven(make_service(sqlite, folder_store, (waits,), allowed_lateness_seconds=36000.0))
    recording, run_id = driven.begin(world_size=2)
    first = recording.write(0, 0, 9)
    driven.judge(run_id, first)
    recording.store.delete(first.path)
    cold = driven.restarted()
    cold.judge(run_id, recording.write(0, 0, 9, worker=1))
    assert cold.segments(run_id) == {("w0", 0): "read", ("w1", 0): "read"}
    assert cold.run(run_id).health["lost_context"] == 1
    (error,) = cold.events(run_id, "rule.error")
    assert "steps after -1 among them were not evaluated" in error["data"]["problem"]


@pytest.mark.ci
def test_a_store_that_is_away_loses_no_context(driven_sqlite: Driven) -> None:
    recording, run_id = judged(driven_sqlite)
    cold = driven_sqlite.restarted()
    cold.announce(run_id, recording.write(len(ENDS), 25, 31, LATE))
    saved = {entry.key: recording.store.get(entry.key) for entry in recording.store.entries("")}

    def unmount(point: str, _subject: object) -> None:
        if point == "evaluate.read":
            for key in saved:
                recording.store.delete(key)

    with listening(unmount), pytest.raises(StoreError, match="has no object of the run"):
        cold.evaluate(run_id)
    for key, data in saved.items():
        recording.store.put(key, data)
    cold.settle(run_id)
    assert cold.run(run_id).health == {}
    assert cold.alerts(run_id)["exploding_gradient"][0] == "firing"


def tiny_from(bad: int) -> Value:
    """Gradients that float16 would make zero, from a step on."""
    return lambda step, name: 1e-30 if step >= bad and name.endswith("gradient") else 1.0


def test_they_are_read_from_when_a_rule_needs_them(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    decode = segment.decode

    def told(data: bytes, name: str, *, histograms: bool = True, **limits: int) -> Block:
        asked.append(histograms)
        return decode(data, name, histograms=histograms, **limits)

    monkeypatch.setattr(segment, "decode", told)
    recording, run_id = driven_sqlite.begin()
    for seq in range(3):
        driven_sqlite.judge(run_id, recording.write(seq, 4 * seq, 4 * seq + 3))
    assert asked == [False, False, False]
    with driven_sqlite.service.database.write() as session:
        put_one(session, session.get_one(RunRow, run_id), HEADROOM)
    for seq in range(3, 5):
        driven_sqlite.judge(run_id, recording.write(seq, 4 * seq, 4 * seq + 3, tiny_from(16)))
    assert all(asked[3:])
    assert driven_sqlite.alerts(run_id)["number_format_headroom"][0] == "firing"


def test_segments_with_more_than_recorders_write_are_read_without_them_or_refused(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(folder_store).begin()
    key = recording.write(0, 0, 11)
    data = recording.store.get(key.path)
    assert collect.decode(data, key, histograms=True).statistics.histogram.size == 36
    monkeypatch.setattr(collect, "SEGMENT_BINS", 35)
    block = collect.decode(data, key, histograms=True)
    assert (len(block), block.statistics.histogram.size) == (36, 0)
    with pytest.raises(ConfigError, match="were not read"):
        block.statistics.histogram.row(0)
    monkeypatch.setattr(collect, "SEGMENT_ROWS", 35)
    with pytest.raises(FormatError, match="contains 36 rows; at most 35 are read"):
        collect.decode(data, key, histograms=False)


def test_decoding_takes_little_more_than_the_bins() -> None:
    """Also if the rows are not in order, and if another order of them is requested."""
    rows, bins = 2_000, 1_000
    lengths = np.full(rows, bins)
    histogram = Histograms(
        np.concatenate([[0], np.cumsum(lengths)]),
        np.tile(np.arange(bins, dtype=np.int16) - bins // 2, rows),
        np.ones(rows * bins, np.int64),
    )
    order = np.random.default_rng(0).permutation(rows)
    with traced_memory() as memory:
        check_histograms(histogram)
        taken = histogram.take(order)
    assert (taken.bins == histogram.bins).all()
    assert memory.peak < histogram.bytes + 24 * 2**20, "the copy, and the indices of a portion"


def test_damage_in_them_that_was_not_looked_at_holds_up_no_other_rule(driven_sqlite: Driven) -> None:
    recording, run_id = driven_sqlite.begin()
    for seq in range(3):
        key = recording.write(seq, 4 * seq, 4 * seq + 3)
        if seq == 2:
            recording.store.put(key.path, damaged(recording.store.get(key.path)))
        driven_sqlite.judge(run_id, key)
    assert set(driven_sqlite.segments(run_id).values()) == {"read"}
    with driven_sqlite.service.database.write() as session:
        put_one(session, session.get_one(RunRow, run_id), HEADROOM)
    driven_sqlite.judge(run_id, recording.write(3, 12, 15, nan_from(13)))
    assert driven_sqlite.alerts(run_id)["non_finite_values"][0] == "firing"
    assert set(driven_sqlite.segments(run_id).values()) == {"read"}


def damaged(data: bytes) -> bytes:
    """A segment in whose histograms one byte is another."""
    start, end = ipc.message_end(data, segment.read_header(data, "s").histograms_at)
    batch = ipc.read_batch(data, *ipc.message_end(data, end), ipc.read_schema(data[start:end]).columns)
    offset, length = batch.parts[-1]
    bent = bytearray(data)
    bent[batch.body + offset + length - 1] ^= 0xFF
    with pytest.raises(FormatError):
        segment.decode(bytes(bent), "s")
    return bytes(bent)
