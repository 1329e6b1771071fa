from __future__ import annotations

import pytest

from tests.services.driving import Driven
from tests.services.recording import Recording, healthy, nan_from
from watchstep.errors import StoreError
from watchstep.format import ipc
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
from watchstep_services.evaluation import collect as collecting
from watchstep_services.runs.discovery import discover


@pytest.fixture
def recording(folder_store: Store) -> Recording:
    return Recording(folder_store).begin()


def test_a_gap_is_waited_for(driven: Driven, recording: Recording) -> None:
    run_id = driven.register()
    driven.announce(run_id, recording.write(0, 0, 3), recording.write(2, 8, 11))
    driven.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read", ("w0", 2): "announced"}
    assert driven.run(run_id).due_ns is not None

    driven.announce(run_id, recording.write(1, 4, 7, nan_from(6)))
    driven.settle(run_id)
    assert set(driven.segments(run_id).values()) == {"read"}
    # It fires at step 6, and the steps behind the gap, which are judged after it, resolve it.
    assert driven.alerts(run_id)["non_finite_values"][:2] == ("resolved", 8)


def test_a_lost_announcement_leaves_no_gap(driven: Driven, recording: Recording) -> None:
    run_id = driven.register()
    recording.write_all([3, 7, 11])
    first, _, third = recording.written["w0"]
    driven.announce(run_id, first, third)
    driven.settle(run_id)
    assert set(driven.segments(run_id).values()) == {"read"}
    assert len(driven.segments(run_id)) == 3


def test_a_missing_segment_is_passed_and_judged_if_it_still_comes(
    driven: Driven, recording: Recording
) -> None:
    patient, run_id = driven, driven.register()
    driven = driven.with_settings(gap_seconds=0.0)
    driven.announce(run_id, recording.write(0, 0, 3), recording.write(2, 8, 11))
    driven.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read", ("w0", 1): "missing", ("w0", 2): "read"}
    assert driven.run(run_id).health["missing_segments"] == 1

    late = recording.write(1, 4, 7, nan_from(6))
    patient.announce(run_id, late)
    patient.settle(run_id)
    assert set(driven.segments(run_id).values()) == {"read"}
    assert driven.alerts(run_id)["non_finite_values"][1] == 6
    ticks = driven.run(run_id).ticks

    patient.announce(run_id, late)
    patient.settle(run_id)
    assert driven.run(run_id).ticks == ticks
    assert driven.run(run_id).cursor == '{"a1/node/w0":3}'


def test_a_corrupt_segment_is_told_and_passed(driven: Driven, recording: Recording) -> None:
    run_id = driven.register()
    keys = [recording.write(0, 0, 3), recording.write(1, 4, 7), recording.write(2, 8, 11, nan_from(9))]
    recording.store.put(keys[1].path, recording.store.get(keys[1].path)[:-40])
    driven.announce(run_id, *keys)
    driven.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read", ("w0", 1): "corrupt", ("w0", 2): "read"}
    assert driven.run(run_id).health["corrupt_segments"] == 1
    assert "0000000001" in driven.run(run_id).health["last_corrupt"]
    assert driven.alerts(run_id)["non_finite_values"][0] == "firing"


def test_a_segment_is_read_again_after_memory_was_short(
    driven: Driven, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = driven.register()
    driven.announce(run_id, recording.write(0, 0, 3))

    def short(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(ipc, "column_values", short)
        with pytest.raises(StoreError, match="out of memory"):
            driven.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "announced"}
    driven.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read"}


def test_a_segment_with_steps_that_its_name_does_not_say_is_corrupt(
    driven: Driven, recording: Recording
) -> None:
    run_id = driven.register()
    key = recording.key(0, 0, 3)
    recording.store.put(key.path, recording.encoded(4, 7))
    driven.announce(run_id, key)
    driven.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "corrupt"}


def test_an_announcement_of_what_is_not_there_moves_nothing(driven: Driven, recording: Recording) -> None:
    run_id = driven.register()
    driven.announce(run_id, recording.key(0, 0, 3), recording.key(10**9, 0, 3))
    driven.settle(run_id)
    assert driven.run(run_id).cursor == "{}"
    hasty = driven.with_settings(gap_seconds=0.0)
    hasty.settle(run_id)
    hasty.settle(run_id)
    assert driven.segments(run_id) == {}
    assert driven.run(run_id).cursor == "{}"

    driven.announce(run_id, recording.write(0, 0, 3))
    driven.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read"}


def test_an_announcement_with_wrong_steps_is_corrected_by_the_store(
    driven: Driven, recording: Recording
) -> None:
    run_id = driven.register()
    true = recording.write(0, 0, 3)
    driven.announce(run_id, SegmentKey(true.writer, 0, 0, 99))
    driven.settle(run_id)
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


def test_two_attempts_are_judged_apart(driven: Driven, recording: Recording, folder_store: Store) -> None:
    run_id = driven.register()
    again = Recording(folder_store, attempt="a2").begin()
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(4)), again.write(0, 4, 9, healthy))
    driven.settle(run_id)
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


def test_an_earlier_attempt_that_is_uploaded_late_is_not_the_newest(
    driven: Driven, folder_store: Store
) -> None:
    later = Recording(folder_store, attempt="later").begin(started_ns=200)
    run_id = driven.register()
    later.write_all([3, 7])
    discover(driven.service, run_id)
    driven.settle(run_id)
    earlier = Recording(folder_store, attempt="earlier").begin(started_ns=100)
    earlier.write_all([3])
    discover(driven.service, run_id)
    driven.settle(run_id)
    assert driven.run(run_id).attempt == "later"
    assert set(driven.segments(run_id).values()) == {"read"}


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


def test_a_document_that_is_too_large_is_a_problem_of_its_own(driven: Driven, recording: Recording) -> None:
    run_id = driven.register()
    recording.store.put("attempts/a0.json", b" " * (5 * 1024 * 1024))
    driven.announce(run_id, recording.write(0, 0, 3))
    discover(driven.service, run_id)
    driven.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read"}


def test_the_end_of_a_writer_is_given_up_while_others_go_on(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin(world_size=2)
    run_id = driven.register()
    driven.announce(run_id, recording.write(0, 0, 3), recording.write(0, 0, 3, worker=1))
    driven.settle(run_id)
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
    driven: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    driven.announce(run_id, recording.write(0, 0, 9, nan_from(5)))
    answers: list[SegmentKey] = []
    whole = collecting.fetch

    def once_cut(run_store: Store, key: SegmentKey) -> bytes:
        data = whole(run_store, key)
        answers.append(key)
        return data[: len(data) // 2] if len(answers) == 1 else data

    monkeypatch.setattr(collecting, "fetch", once_cut)
    driven.settle(run_id)
    assert set(driven.segments(run_id).values()) == {"read"}
    assert driven.alerts(run_id)
