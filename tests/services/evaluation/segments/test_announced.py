"""Announcements that are made up, or heard of from others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import insert, select

from tests.services.driving import Driven
from tests.services.recording import PROJECT, nan_from
from watchstep.errors import NotFoundError
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.store.store import Store
from watchstep_services.db.models import Project, Segment
from watchstep_services.evaluation import collect
from watchstep_services.evaluation.inbox import (
    MOST_ENTRIES,
    Gap,
    GapTimeout,
    InboxEntry,
    make_plan,
    open_inbox,
)
from watchstep_services.runs.discovery import discover

MOST = 32


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[SegmentKey]:
    """Absent segments that were looked up."""
    absent: list[SegmentKey] = []
    fetch = collect.fetch

    def counting(store: Store, key: SegmentKey) -> bytes:
        try:
            return fetch(store, key)
        except NotFoundError:
            absent.append(key)
            raise

    monkeypatch.setattr(collect, "fetch", counting)
    return absent


def made_up(count: int, *, attempts: bool = False) -> list[SegmentKey]:
    """First segments of so many writers that do not exist, each of an attempt of its own or all of one."""
    return [
        SegmentKey(WriterId(f"x{number:03}" if attempts else "a1", "node", f"fake{number:03}"), 0, 0, 3)
        for number in range(count)
    ]


def states(driven: Driven, run_id: int) -> dict[str, int]:
    with driven.service.database.read() as session:
        rows = session.execute(select(Segment.state).filter_by(run_id=run_id)).scalars().all()
    return {state: rows.count(state) for state in sorted(set(rows))}


@pytest.mark.ci
@pytest.mark.parametrize("attempts", [False, True])
def test_an_evaluation_looks_up_a_few_and_all_are_forgotten_once_the_store_is_listed(
    driven: Driven, lookups: list[SegmentKey], attempts: bool
) -> None:
    recording, run_id = driven.begin()
    discover(driven.service, run_id)
    driven.announce(run_id, *made_up(100, attempts=attempts))
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    bucket = driven.with_settings(listing_seconds=3600.0)
    assert bucket.evaluate(run_id).more == attempts
    # An attempt with a document comes first; of the writers of one attempt nobody knows which are real.
    assert len(lookups) == (0 if attempts else MOST)
    lookups.clear()
    driven.settle(run_id)
    assert len(lookups) <= MOST
    assert states(driven, run_id) == {"read": 1}
    assert driven.alerts(run_id)["non_finite_values"][0] == "firing"


def test_the_next_segments_of_real_writers_are_read_beside_made_up_ones(
    driven: Driven, lookups: list[SegmentKey]
) -> None:
    recording, run_id = driven.record(last=3)
    driven.announce(run_id, *made_up(100))
    driven.announce(run_id, recording.write(1, 4, 7, nan_from(5)))
    driven.evaluate(run_id)
    assert len(lookups) == MOST
    assert driven.alerts(run_id)["non_finite_values"][0] == "firing"


@pytest.mark.release
def test_more_announcements_are_forgotten_than_a_statement_has_parameters(driven_sqlite: Driven) -> None:
    recording, run_id = driven_sqlite.begin()
    driven_sqlite.judge(run_id, *made_up(40_000), recording.write(0, 0, 3))
    assert states(driven_sqlite, run_id) == {"read": 1}


@pytest.mark.ci
def test_an_inbox_has_the_first_segments_of_each_writer_and_a_limit(driven: Driven) -> None:
    recording, run_id = driven.begin()
    driven.announce(run_id, recording.write(0, 0, 3))
    writers = [WriterId("a1", "node", f"fake{number}") for number in range(MOST_ENTRIES // 2)]
    of_each = {"run_id": run_id, "first": 0, "last": 3, "state": "announced", "found_ns": 0}
    rows = [{**of_each, **vars(writer), "seq": seq} for seq in (3, 1, 2) for writer in writers]
    with driven.service.database.write() as session:
        session.execute(insert(Segment), rows)
    inbox = open_inbox(driven.service.database, run_id)
    assert inbox.is_cut
    assert len(inbox.entries) == MOST_ENTRIES
    assert {entry.key.seq for entry in inbox.entries} == {0, 1, 2}


def test_an_end_is_no_gap_while_the_inbox_has_only_the_first_segments() -> None:
    writer = WriterId("a1", "node", "w0")
    entry = InboxEntry(1, SegmentKey(writer, 0, 0, 3), 0)
    ends = {"a1": {"0": {"writer": "w0", "segments": 9, "found_ns": 0}}}
    timeout = GapTimeout(now_ns=10, gap_ns=1, listed=True)
    assert make_plan({}, [entry], ends, timeout).trailing == (Gap(writer, 1, 9, 0),)
    cut = make_plan({}, [entry], ends, replace(timeout, ends_known=False))
    assert (len(cut.readable), cut.waiting, cut.trailing) == (1, (), ())


def test_look_ups_of_absent_segments_defer_the_project(driven: Driven) -> None:
    run_id = driven.register()
    driven.settle(run_id)
    driven.change(Project, deferred_until_ns=0)  # on a busy machine, a listing may have deferred it already
    driven.judge(run_id, *made_up(1))
    assert deferred_until_ns(driven) > 0


def deferred_until_ns(driven: Driven) -> int:
    return driven.one(select(Project.deferred_until_ns).filter_by(name=PROJECT))


def test_an_attempt_of_which_nothing_lies_on_the_store_is_none(driven: Driven) -> None:
    recording = driven.recording().begin()
    recording.write(0, 0, 7)
    run_id = driven.register()
    driven.discover(run_id)

    driven.judge(run_id, SegmentKey(WriterId("made-up", "node", "w0"), 0, 0, 10**18 - 1))

    run = driven.run(run_id)
    assert (run.attempt, run.last_step) == ("a1", 7)
    driven.judge(run_id, recording.write(1, 8, 9))
    assert driven.run(run_id).last_step == 9, "what is real is judged all the same"


def test_an_attempt_without_a_document_does_not_become_the_newest(driven: Driven) -> None:
    driven.recording().begin().write(0, 0, 7)
    run_id = driven.register()
    driven.discover(run_id)

    stray = driven.recording(attempt="made-up")
    driven.judge(run_id, stray.write(0, 0, 9))

    run = driven.run(run_id)
    assert (run.attempt, run.last_step) == ("a1", 9)
    assert driven.segments(run_id) == {("w0", 0): "read"}


def test_numbers_that_leave_everything_out_cost_no_rows(driven_sqlite: Driven) -> None:
    driven = driven_sqlite.with_settings(gap_seconds=0.0)
    recording = driven_sqlite.recording().begin()
    for worker in range(3):
        recording.write(900_000_000, 0, 7, worker=worker)
    run_id = driven.register()
    driven.discover(run_id)
    assert len(driven.segments(run_id)) == 3 + 1000
    assert driven.run(run_id).health["missing_segments"] == 2_700_000_000
