"""Claims of runs: which is the longest due, what a claim tells of a run, and many workers at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from tests.services.driving import Driven, make_service
from tests.services.postgres import Postgres
from tests.services.recording import PROJECT, healthy, nan_from
from watchstep.store.store import Store
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.db.clock import replace_clock
from watchstep_services.db.engine import Database, open_database
from watchstep_services.db.models import Attempt, Project, RunRow, Segment
from watchstep_services.db.schema import upgrade
from watchstep_services.evaluation.evaluate import evaluate_longest_due
from watchstep_services.evaluation.inbox import FAILED_ATTEMPTS, open_inbox
from watchstep_services.runs.claim import (
    AFFINITY_NS,
    AHEAD_NS,
    KEPT_NS,
    MESSAGE_NS,
    URGENT_NS,
    Claim,
    claim,
    claim_longest_due,
)
from watchstep_services.runs.discovery import discover, key_of
from watchstep_services.scheduler.sweep import find_due, note_requested
from watchstep_services.tenancy import find_project, move_project

LEASE_NS = nanoseconds(60.0)
NOW_NS = 1_700_000_000 * NANOSECONDS
LONG_LEASE_NS = 10**12
STEPS = 40


def with_standing_clock(database: Database) -> Database:
    """A database that has run nothing yet, whose time stands still: how long the test takes changes no order."""
    replace_clock(database.engine, str(NOW_NS))
    return database


@pytest.fixture
def standing(database: Database, folder_store: Store) -> Driven:
    """A service on each kind of database."""
    return Driven(make_service(with_standing_clock(database), folder_store))


def runs(standing: Driven, *states: dict[str, Any]) -> list[int]:
    """Runs, each with rows of its table; ``ago`` is how many seconds each has been due, ``leased`` it is held for, and ``urgent`` it
    has been urgent for."""
    ids = []
    for number, state in enumerate(states):
        standing.recording(run=f"run-{number}").begin()
        ids.append(standing.register(f"run-{number}"))
        standing.change(
            RunRow,
            ids[-1],
            due_ns=NOW_NS - int(state["ago"] * NANOSECONDS),
            cached_by=state.get("cached_by", ""),
            urgent_ns=NOW_NS - int(state["urgent"] * NANOSECONDS) if "urgent" in state else 0,
            lease_until_ns=NOW_NS + int(state["leased"] * NANOSECONDS) if "leased" in state else 0,
        )
    return ids


def taken(standing: Driven, asked: int) -> int | None:
    held = claim_longest_due(standing.service.database, asked, "mine", LEASE_NS)
    return None if held is None else held.run_id


def test_what_has_been_due_for_longest_is_taken_first(standing: Driven) -> None:
    newest, oldest, middle = runs(standing, {"ago": 1}, {"ago": 3, "cached_by": "mine"}, {"ago": 2})
    assert [taken(standing, newest) for _ in range(4)] == [oldest, middle, newest, None]


def test_what_another_worker_holds_is_left_to_it_for_as_long_as_a_message_is_waited_for(
    standing: Driven,
) -> None:
    late = (MESSAGE_NS + KEPT_NS) / NANOSECONDS
    fresh, mine, forgotten = runs(
        standing,
        {"ago": AFFINITY_NS / NANOSECONDS / 2, "cached_by": "other"},
        {"ago": 1, "cached_by": "mine"},
        {"ago": late, "cached_by": "other"},
    )
    assert [taken(standing, mine) for _ in range(3)] == [forgotten, mine, None]
    assert taken(standing, fresh) == fresh


def test_two_workers_that_are_behind_are_behind_by_as_much(standing: Driven) -> None:
    """The worker with less work takes the oldest runs of the other one: no stop waits much longer than the others."""
    mine, oldest, old = runs(
        standing,
        {"ago": 20, "cached_by": "mine"},
        {"ago": 30, "cached_by": "other"},
        {"ago": 24, "cached_by": "other"},
    )
    assert [taken(standing, mine) for _ in range(3)] == [oldest, mine, old]


def test_a_run_whose_worker_died_goes_first_once_its_lease_is_over(standing: Driven) -> None:
    late = 2 * MESSAGE_NS / NANOSECONDS
    stuck, mine = runs(
        standing,
        {"ago": late, "cached_by": "dead", "leased": 3600},
        {"ago": 1, "cached_by": "mine"},
    )
    assert taken(standing, mine) == mine
    with standing.service.database.write() as session:
        session.get_one(
            RunRow, stuck
        ).lease_until_ns = 1  # its lease ends, and no message of it is left anywhere
        session.get_one(RunRow, mine).lease_until_ns = 0
    assert taken(standing, mine) == stuck


def test_where_all_wait_a_worker_keeps_to_what_it_holds_but_leaves_nothing_for_ever(standing: Driven) -> None:
    late = (MESSAGE_NS + KEPT_NS) / NANOSECONDS
    others, longest, mine = runs(
        standing,
        {"ago": late + 1, "cached_by": "other"},
        {"ago": 2 * late, "cached_by": "dead"},
        {"ago": late, "cached_by": "mine"},
    )
    assert [taken(standing, others) for _ in range(4)] == [longest, mine, others, None]


def test_where_something_sudden_happened_goes_before_what_has_not_waited_far_longer(standing: Driven) -> None:
    ahead, short = AHEAD_NS / NANOSECONDS, URGENT_NS / NANOSECONDS
    waited, urgent, longest, past = runs(
        standing,
        {"ago": ahead - 1, "cached_by": "mine"},
        {"ago": 1, "cached_by": "mine", "urgent": 1},
        {"ago": ahead + 3, "cached_by": "mine"},
        {"ago": 2, "cached_by": "mine", "urgent": short + 1},
    )
    assert [taken(standing, past) for _ in range(5)] == [longest, urgent, waited, past, None]


def test_a_message_about_one_run_has_the_bad_step_of_another_judged(standing: Driven) -> None:
    standing = Driven(replace(standing.service, worker="mine"))
    bad = standing.recording(run="bad").begin()
    good = standing.recording(run="good").begin()
    bad_id, good_id = standing.register("bad"), standing.register("good")
    standing.announce(bad_id, bad.write(0, 0, 7, nan_from(5)))
    standing.announce(good_id, good.write(0, 0, 7, healthy))
    standing.change(RunRow, bad_id, due_ns=NOW_NS - 1)
    done = [evaluate_longest_due(standing.service, good_id) for _ in range(2)]
    assert [(run_id, one.outcome) for run_id, one in done] == [(bad_id, "committed"), (good_id, "committed")]
    assert standing.alerts(bad_id)["non_finite_values"][:2] == ("firing", 5)
    # Where nothing is due, it is the run of the message that is looked at.
    assert evaluate_longest_due(standing.service, good_id)[0] == good_id


@pytest.mark.ci
def test_a_run_that_is_being_written_keeps_nobody_from_the_others(
    postgres: Postgres, folder_store: Store
) -> None:
    late = 2 * MESSAGE_NS / NANOSECONDS
    with postgres.new_database() as url:
        database = with_standing_clock(open_database(url))
        upgrade(database)
        standing = Driven(make_service(database, folder_store))
        written, other = runs(standing, {"ago": late + 1}, {"ago": late})
        with database.write() as paused:
            paused.execute(select(RunRow.id).where(RunRow.id == written).with_for_update()).one()
            assert set(find_due(standing.service).runs) == {written, other}
            note_requested(standing.service, [written, other])
            assert find_due(standing.service).runs == (written,)
            assert taken(standing, written) == other
            assert taken(standing, written) is None
        assert claim(database, written, LEASE_NS) is not None
        database.close()


@pytest.fixture
def run_id(driven: Driven) -> int:
    """A run with two attempts, one segment that was read in each, and segments that were not."""
    run_id = driven.register()
    recordings = [driven.recording(attempt=attempt).begin() for attempt in ("a1", "a2")]
    for recording in recordings:
        driven.judge(run_id, recording.write(0, 0, 3, nan_from(2)))
    for recording in recordings:
        driven.announce(run_id, recording.write(1, 4, 7), recording.write(2, 8, 11))
    return run_id


@pytest.mark.parametrize(("way", "moves_runs"), [("by_id", False), ("by_id", True), ("longest_due", False)])
def test_a_claim_has_the_run_and_the_location_of_its_registration(
    driven: Driven, run_id: int, way: str, moves_runs: bool
) -> None:
    database = driven.service.database
    with database.write() as session:
        project = find_project(session, PROJECT)
        move_project(session, project, project.placed.store, "team/vision", moves_runs=moves_runs)
    before = driven.run(run_id)
    claimed = (
        claim(database, run_id, LONG_LEASE_NS)
        if way == "by_id"
        else claim_longest_due(database, run_id, "w1", LONG_LEASE_NS)
    )
    assert claimed is not None
    with database.read() as session:
        place = session.get_one(RunRow, run_id).place
        assert session.get_one(Project, PROJECT).place.prefix == "team/vision"
    assert place.prefix == ("team/vision" if moves_runs else "")
    assert claimed == Claim(
        run_id, PROJECT, before.run, place, before.epoch + 1, before.cursor, before.journal, before.ticks,
        claimed.now_ns, before.hints, before.state, before.state_attempt, before.attempt,
    )  # fmt: skip
    assert claim(database, run_id, LONG_LEASE_NS) is None


def test_an_inbox_has_unread_segments_and_attempts(driven: Driven, run_id: int) -> None:
    database = driven.service.database
    inbox = open_inbox(database, run_id)
    with database.read() as session:
        waiting = session.execute(select(Segment).filter_by(run_id=run_id, state="announced")).scalars().all()
        attempts = session.execute(select(Attempt).filter_by(run_id=run_id)).scalars().all()
    assert len(waiting) == 4
    found = {(entry.row_id, entry.key, entry.found_ns, entry.traceparent) for entry in inbox.entries}
    assert found == {(row.id, key_of(row), row.found_ns, row.traceparent) for row in waiting}
    assert {name: columns(row) for name, row in inbox.attempts.items()} == {
        row.attempt: columns(row) for row in attempts
    }
    assert not inbox.calm, "an alert fires"
    assert inbox.failing == frozenset()


def test_an_inbox_of_an_empty_run_is_calm_until_an_evaluation_fails(driven: Driven) -> None:
    run_id = driven.register()
    inbox = open_inbox(driven.service.database, run_id)
    assert (inbox.entries, inbox.attempts, inbox.calm, inbox.failing) == ([], {}, True, frozenset())
    driven.change(RunRow, run_id, health={FAILED_ATTEMPTS: {"a1": "the store refused"}})
    inbox = open_inbox(driven.service.database, run_id)
    assert (inbox.calm, inbox.failing) == (False, frozenset({"a1"}))


def columns(row: Attempt) -> dict[str, Any]:
    return {column.key: getattr(row, column.key) for column in Attempt.__table__.columns}


@pytest.mark.ci
def test_many_workers_judge_every_segment_once(driven: Driven) -> None:
    recording, run_id = driven.begin()
    written = threading.Event()

    def record() -> None:
        for step in range(STEPS):
            driven.announce(run_id, recording.write(step, step, step, nan_from(0)))
        written.set()

    def work(worker: Driven) -> int:
        committed = 0
        while True:
            last = written.is_set()
            discover(worker.service, run_id)
            result = worker.evaluate(run_id)
            committed += result.outcome == "committed"
            if last and result.outcome == "idle" and not result.more:
                return committed

    with ThreadPoolExecutor(4) as pool:
        recorder = pool.submit(record)
        workers = [pool.submit(work, driven.restarted()) for _ in range(3)]
        recorder.result()
        committed = sum(worker.result() for worker in workers)

    rows = driven.all(select(Segment).order_by(Segment.position))
    assert [(row.position, row.seq, row.state) for row in rows] == [(i, i, "read") for i in range(STEPS)]
    assert driven.run(run_id).ticks == committed
    assert driven.memories()[0][3] == STEPS
    assert driven.event_types(run_id).count("alert.firing") == 1
    assert len(driven.actions(run_id)) == 1
