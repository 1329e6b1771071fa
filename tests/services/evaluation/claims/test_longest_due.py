"""Which run a message leads to: the one that has been due for longest, of those that a worker is to take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from tests.services.driving import Driven, make_service
from tests.services.postgres import Postgres
from tests.services.recording import Recording, healthy, nan_from
from watchstep.store.store import Store
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.db.clock import replace_clock
from watchstep_services.db.engine import Database, open_database
from watchstep_services.db.models import RunRow
from watchstep_services.db.schema import upgrade
from watchstep_services.evaluation.evaluate import evaluate_longest_due
from watchstep_services.runs.claim import (
    AFFINITY_NS,
    AHEAD_NS,
    KEPT_NS,
    MESSAGE_NS,
    URGENT_NS,
    claim,
    claim_longest_due,
)
from watchstep_services.scheduler.sweep import find_due, note_requested

LEASE_NS = nanoseconds(60.0)
NOW_NS = 1_700_000_000 * NANOSECONDS


def with_standing_clock(database: Database) -> Database:
    """A database that has run nothing yet, whose time stands still: how long the test takes changes no order."""
    replace_clock(database.engine, str(NOW_NS))
    return database


@pytest.fixture
def driven(database: Database, folder_store: Store) -> Driven:
    """A service on each kind of database."""
    return Driven(make_service(with_standing_clock(database), folder_store))


def runs(driven: Driven, store: Store, *states: dict[str, Any]) -> list[int]:
    """Runs, each with rows of its table; ``ago`` is how many seconds each has been due, ``leased`` it is held for, and ``urgent`` it
    has been urgent for."""
    ids = []
    for number, state in enumerate(states):
        Recording(store, run=f"run-{number}").begin()
        ids.append(driven.register(f"run-{number}"))
        with driven.service.database.write() as session:
            row = session.get_one(RunRow, ids[-1])
            row.due_ns = NOW_NS - int(state["ago"] * NANOSECONDS)
            row.cached_by = state.get("cached_by", "")
            row.urgent_ns = NOW_NS - int(state["urgent"] * NANOSECONDS) if "urgent" in state else 0
            row.lease_until_ns = NOW_NS + int(state["leased"] * NANOSECONDS) if "leased" in state else 0
    return ids


def taken(driven: Driven, asked: int) -> int | None:
    held = claim_longest_due(driven.service.database, asked, "mine", LEASE_NS)
    return None if held is None else held.run_id


def test_what_has_been_due_for_longest_is_taken_first(driven: Driven, folder_store: Store) -> None:
    newest, oldest, middle = runs(
        driven, folder_store, {"ago": 1}, {"ago": 3, "cached_by": "mine"}, {"ago": 2}
    )
    assert [taken(driven, newest) for _ in range(4)] == [oldest, middle, newest, None]


def test_what_another_worker_holds_is_left_to_it_for_as_long_as_a_message_is_waited_for(
    driven: Driven, folder_store: Store
) -> None:
    late = (MESSAGE_NS + KEPT_NS) / NANOSECONDS
    fresh, mine, forgotten = runs(
        driven,
        folder_store,
        {"ago": AFFINITY_NS / NANOSECONDS / 2, "cached_by": "other"},
        {"ago": 1, "cached_by": "mine"},
        {"ago": late, "cached_by": "other"},
    )
    assert [taken(driven, mine) for _ in range(3)] == [forgotten, mine, None]
    assert taken(driven, fresh) == fresh


def test_two_workers_that_are_behind_are_behind_by_as_much(driven: Driven, folder_store: Store) -> None:
    """The worker with less work takes the oldest runs of the other one: no stop waits much longer than the others."""
    mine, oldest, old = runs(
        driven,
        folder_store,
        {"ago": 20, "cached_by": "mine"},
        {"ago": 30, "cached_by": "other"},
        {"ago": 24, "cached_by": "other"},
    )
    assert [taken(driven, mine) for _ in range(3)] == [oldest, mine, old]


def test_a_run_whose_worker_died_goes_first_once_its_lease_is_over(
    driven: Driven, folder_store: Store
) -> None:
    late = 2 * MESSAGE_NS / NANOSECONDS
    stuck, mine = runs(
        driven,
        folder_store,
        {"ago": late, "cached_by": "dead", "leased": 3600},
        {"ago": 1, "cached_by": "mine"},
    )
    assert taken(driven, mine) == mine
    with driven.service.database.write() as session:
        session.get_one(
            RunRow, stuck
        ).lease_until_ns = 1  # its lease ends, and no message of it is left anywhere
        session.get_one(RunRow, mine).lease_until_ns = 0
    assert taken(driven, mine) == stuck


def test_where_all_wait_a_worker_keeps_to_what_it_holds_but_leaves_nothing_for_ever(
    driven: Driven, folder_store: Store
) -> None:
    late = (MESSAGE_NS + KEPT_NS) / NANOSECONDS
    others, longest, mine = runs(
        driven,
        folder_store,
        {"ago": late + 1, "cached_by": "other"},
        {"ago": 2 * late, "cached_by": "dead"},
        {"ago": late, "cached_by": "mine"},
    )
    assert [taken(driven, others) for _ in range(4)] == [longest, mine, others, None]


def test_where_something_sudden_happened_goes_before_what_has_not_waited_far_longer(
    driven: Driven, folder_store: Store
) -> None:
    ahead, short = AHEAD_NS / NANOSECONDS, URGENT_NS / NANOSECONDS
    waited, urgent, longest, past = runs(
        driven,
        folder_store,
        {"ago": ahead - 1, "cached_by": "mine"},
        {"ago": 1, "cached_by": "mine", "urgent": 1},
        {"ago": ahead + 3, "cached_by": "mine"},
        {"ago": 2, "cached_by": "mine", "urgent": short + 1},
    )
    assert [taken(driven, past) for _ in range(5)] == [longest, urgent, waited, past, None]


def test_a_message_about_one_run_has_the_bad_step_of_another_judged(
    driven: Driven, folder_store: Store
) -> None:
    driven = Driven(replace(driven.service, worker="mine"))
    bad = Recording(folder_store, run="bad").begin()
    good = Recording(folder_store, run="good").begin()
    bad_id, good_id = driven.register("bad"), driven.register("good")
    driven.announce(bad_id, bad.write(0, 0, 7, nan_from(5)))
    driven.announce(good_id, good.write(0, 0, 7, healthy))
    with driven.service.database.write() as session:
        session.get_one(RunRow, bad_id).due_ns = NOW_NS - 1
    done = [evaluate_longest_due(driven.service, good_id) for _ in range(2)]
    assert [(run_id, one.outcome) for run_id, one in done] == [(bad_id, "committed"), (good_id, "committed")]
    assert driven.alerts(bad_id)["non_finite_values"][:2] == ("firing", 5)
    # Where nothing is due, it is the run of the message that is looked at.
    assert evaluate_longest_due(driven.service, good_id)[0] == good_id


def test_a_run_that_is_being_written_keeps_nobody_from_the_others(
    postgres: Postgres, folder_store: Store
) -> None:
    late = 2 * MESSAGE_NS / NANOSECONDS
    with postgres.new_database() as url:
        database = with_standing_clock(open_database(url))
        upgrade(database)
        driven = Driven(make_service(database, folder_store))
        written, other = runs(driven, folder_store, {"ago": late + 1}, {"ago": late})
        with database.write() as paused:
            paused.execute(select(RunRow.id).where(RunRow.id == written).with_for_update()).one()
            assert set(find_due(driven.service).runs) == {written, other}
            note_requested(driven.service, [written, other])
            assert find_due(driven.service).runs == (written,)
            assert taken(driven, written) == other
            assert taken(driven, written) is None
        assert claim(database, written, LEASE_NS) is not None
        database.close()
