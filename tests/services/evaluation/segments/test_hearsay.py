"""Attempts that are only announced: whoever may announce must not decide which attempt of a run is its newest."""

from __future__ import annotations

from tests.services.driving import Driven
from tests.services.recording import Recording
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.store.store import Store
from watchstep_services.runs.discovery import discover


def test_an_attempt_of_which_nothing_lies_on_the_store_is_none(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    recording.write(0, 0, 7)
    run_id = driven.register()
    discover(driven.service, run_id)
    driven.settle(run_id)

    driven.announce(run_id, SegmentKey(WriterId("made-up", "node", "w0"), 0, 0, 10**18 - 1))
    driven.settle(run_id)

    run = driven.run(run_id)
    assert (run.attempt, run.last_step) == ("a1", 7)
    driven.announce(run_id, recording.write(1, 8, 9))
    driven.settle(run_id)
    assert driven.run(run_id).last_step == 9, "what is real is judged all the same"


def test_an_attempt_without_a_document_does_not_become_the_newest(
    driven: Driven, folder_store: Store
) -> None:
    Recording(folder_store).begin().write(0, 0, 7)
    run_id = driven.register()
    discover(driven.service, run_id)
    driven.settle(run_id)

    stray = Recording(folder_store, attempt="made-up")
    driven.announce(run_id, stray.write(0, 0, 9))
    driven.settle(run_id)

    run = driven.run(run_id)
    assert (run.attempt, run.last_step) == ("a1", 9)
    assert driven.segments(run_id) == {("w0", 0): "read"}


def test_numbers_that_leave_everything_out_cost_no_rows(driven_sqlite: Driven, folder_store: Store) -> None:
    driven = driven_sqlite.with_settings(gap_seconds=0.0)
    recording = Recording(folder_store).begin()
    for worker in range(3):
        recording.write(900_000_000, 0, 7, worker=worker)
    run_id = driven.register()
    discover(driven.service, run_id)
    driven.settle(run_id)
    assert len(driven.segments(run_id)) == 3 + 1000
    assert driven.run(run_id).health["missing_segments"] == 2_700_000_000
