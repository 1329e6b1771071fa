"""A database's clock that is set back keeps nothing from its turn for longer than before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import InstrumentedAttribute

from tests.services.driving import Driven, make_service
from tests.services.notify.clock import SECOND, Clock, open_with
from tests.services.recording import PROJECT, Recording, nan_from
from watchstep.format.layout import WriterId
from watchstep.store.store import Store
from watchstep_services.db.clock import AGAIN_NS, MOMENTS, follow_clock
from watchstep_services.db.models import (
    ActionRow,
    AlertGroup,
    Attempt,
    Backtest,
    Base,
    BoundJobRow,
    Project,
    RunRow,
    Segment,
    Upkeep,
)
from watchstep_services.evaluation.inbox import Gap, GapTimeout
from watchstep_services.evaluation.watermark import AttemptProgress, WriterProgress, decide
from watchstep_services.runs.claim import claim
from watchstep_services.scheduler.sweep import sweep

HOUR = 3600 * SECOND
COLUMNS = [column for columns, _rows in MOMENTS for column in columns]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(clock: Clock, sqlite_tables: Path, folder_store: Store, tmp_path: Path) -> Iterator[Driven]:
    """A service whose database's clock the test moves."""
    database = open_with(clock, sqlite_tables, tmp_path / "timed.sqlite")
    yield Driven(make_service(database, folder_store))
    database.close()


def settle(driven: Driven) -> list[int]:
    """Runs that a sweep finds due, evaluated."""
    due = list(sweep(driven.service).runs)
    for run_id in due:
        driven.settle(run_id)
    return due


def test_new_runs_are_found_and_judged(timed: Driven, clock: Clock, folder_store: Store) -> None:
    Recording(folder_store, run="before").begin()
    settle(timed)
    clock.move(-3600)
    Recording(folder_store, run="after").begin().write_all([3, 7], nan_from(5))
    for _ in range(2):
        settle(timed)
        clock.move(2)
    assert timed.run(2).run == "after"
    assert timed.alerts(2)["non_finite_values"][:2] == ("firing", 5)


def test_what_nobody_announces_of_a_known_run_is_found(
    timed: Driven, clock: Clock, folder_store: Store
) -> None:
    recording = Recording(folder_store).begin()
    settle(timed)
    clock.move(40)
    settle(timed)
    clock.move(-3600)
    recording.write_all([3, 7], nan_from(5))
    for _ in range(3):
        settle(timed)
        clock.move(40)
    assert timed.alerts(1)["non_finite_values"][:2] == ("firing", 5)


def test_the_lease_of_a_dead_worker_ends(timed: Driven, clock: Clock, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    settle(timed)
    recording.write_all([3, 7], nan_from(5))
    timed.announce(1, *recording.written["w0"])
    assert claim(timed.service.database, 1, 60 * SECOND) is not None
    clock.move(-3600)
    settle(timed)
    assert not timed.alerts(1)
    clock.move(61)
    settle(timed)
    assert timed.alerts(1)["non_finite_values"][:2] == ("firing", 5)


def row_of(table: Any, database: Any) -> None:
    """A row of each table, which waits for nothing."""
    rows: list[Base] = [
        Attempt(run_id=1, attempt="z", world_size=1, on_stop="ignore", writers={}, ends={}, context=[]),
        BoundJobRow(run_id=1, attempt="z", backend="local", job_id="1", identity={}, bound_by="x"),
        Segment(
            run_id=1, attempt="z", node="n", writer="w", seq=0, first=0, last=0, state="announced", found_ns=1
        ),
        ActionRow(run_id=1, event_id="e", kind="stop", key="k", payload={}, created_ns=1, next_ns=1),
        AlertGroup(
            project=PROJECT, key="k", receiver="r", labels={}, wait_ns=1, interval_ns=1, repeat_ns=1,
            send_resolved=False,
        ),
        Upkeep(run_id=1),
        Backtest(project=PROJECT, runs=[], rules=[], sweeps=[], created_ns=1),
    ]  # fmt: skip
    with database.write() as session:
        session.add_all(row for row in rows if isinstance(row, table))


@pytest.mark.parametrize("column", COLUMNS, ids=str)
def test_every_moment_that_is_waited_for_moves_with_the_clock(
    timed: Driven, clock: Clock, column: InstrumentedAttribute[Any]
) -> None:
    database, table = timed.service.database, column.class_
    timed.register()
    if table not in {RunRow, Project}:
        row_of(table, database)
    follow_clock(database)
    now = clock.now_ns

    def put(moment: int) -> None:
        with database.write() as session:
            session.execute(update(table).values({column.key: moment}))

    def read() -> int:
        with database.read() as session:
            return int(session.execute(select(column)).scalar_one())

    put(now + 10 * SECOND)
    clock.move(-3600)
    assert follow_clock(database) == HOUR
    assert read() == now - HOUR + 10 * SECOND
    # What went on over the step writes its moment late, and it is moved once more; what is meant is not.
    put(now + 30 * SECOND)
    clock.now_ns += AGAIN_NS
    assert follow_clock(database) == 0
    assert read() == now - HOUR + 30 * SECOND
    put(now + 30 * SECOND)
    clock.move(600)
    follow_clock(database)
    assert read() == now + 30 * SECOND


def test_a_clock_that_goes_on_moves_nothing(timed: Driven, clock: Clock) -> None:
    run_id = timed.register()
    before = timed.run(run_id).poll_ns, timed.run(run_id).last_seen_ns
    for seconds in (0, 1, 100, -0.5, 1e6):
        clock.move(seconds)
        assert follow_clock(timed.service.database) == 0
    assert (timed.run(run_id).poll_ns, timed.run(run_id).last_seen_ns) == before


def test_a_rank_that_was_heard_in_the_future_is_not_waited_for() -> None:
    def progress(last_seen_ns: int) -> AttemptProgress:
        writers = {"n/w/0": WriterProgress(9, 1, (0,)), "n/w/1": WriterProgress(4, last_seen_ns, (1,))}
        return AttemptProgress(2, 1, writers, frozenset(), 4)

    assert decide(progress(HOUR), 0, SECOND) is not None
    assert decide(progress(SECOND), 0, SECOND) is None


def test_a_gap_that_was_found_in_the_future_is_not_waited_for() -> None:
    patience = GapTimeout(0, SECOND, listed=True)
    assert patience.over(Gap(WriterId("a1", "n", "w"), 0, 1, HOUR))
    assert not patience.over(Gap(WriterId("a1", "n", "w"), 0, 1, SECOND))
