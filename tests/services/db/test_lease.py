"""Leases, also where a clock steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sqlalchemy import select, true, update
from sqlalchemy.orm import InstrumentedAttribute

from tests.services.driving import Driven, make_service
from tests.services.jobs import eventually
from tests.services.notify.clock import SECOND, Clock, open_with
from tests.services.recording import PROJECT, nan_from
from watchstep.format.layout import WriterId
from watchstep.store.store import Store
from watchstep_services.core.failpoints import listening
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.db.clock import AGAIN_NS, MOMENTS, follow_clock, read_clock, replace_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.lease import (
    ACTION_LEASE,
    BACKTEST_LEASE,
    EXPIRED_NS,
    POLL_LEASE,
    RUN_LEASE,
    UPKEEP_LEASE,
    Lease,
    LeasedRow,
    keep_lease,
)
from watchstep_services.db.models import (
    ActionRow,
    AlertGroup,
    Attempt,
    Backtest,
    Base,
    BoundJobRow,
    Project,
    ProjectStore,
    RunRow,
    Segment,
    StoreRow,
    Upkeep,
)
from watchstep_services.evaluation.inbox import Gap, GapTimeout
from watchstep_services.evaluation.watermark import AttemptProgress, RankProgress, decide
from watchstep_services.runs.claim import Claim, claim
from watchstep_services.scheduler.sweep import sweep

SECONDS = 0.3
STARTED_NS = 1_700_000_000 * NANOSECONDS
LEASES: dict[str, Lease[Any]] = {
    "runs": RUN_LEASE,
    "actions": ACTION_LEASE,
    "backtests": BACKTEST_LEASE,
    "upkeep": UPKEEP_LEASE,
    "polls": POLL_LEASE,
}
HOUR = 3600 * SECOND
COLUMNS = [column for columns, _rows in MOMENTS for column in columns]


@dataclass
class Row:
    """A row of work in a database whose clock the test moves."""

    database: Database
    lease: Lease[Any]
    key: int = 1

    def free(self) -> None:
        """Bring the row back to a released one; the epoch goes on counting."""
        with self.database.write() as session:
            statement = update(self.lease.model).values({self.lease.until: 0})
            session.execute(statement.execution_options(synchronize_session=False))

    def claim(self, seconds: int) -> int | None:
        with self.database.write() as session:
            return self.lease.claim(session, self.key, seconds * NANOSECONDS)

    def renew(self, token: int, seconds: int) -> bool:
        with self.database.bare() as connection:
            return self.lease.renew(connection, self.key, token, seconds * NANOSECONDS)

    def release(self, token: int) -> bool:
        with self.database.write() as session:
            return self.lease.release(session, self.key, token)

    def may_commit(self, token: int) -> bool:
        with self.database.write() as session:
            return self.lease.lock(session, self.key, token) is not None

    def advance(self, seconds: int) -> None:
        with self.database.engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE lease_clock SET now_ns = now_ns + {seconds * NANOSECONDS}")


def rows_of(key: int) -> list[Base]:
    return [
        Project(name="vision", description=""),
        StoreRow(id=1, name="default", url="/runs", created_ns=0, updated_ns=0),
        ProjectStore(id=1, project="vision", store_id=1),
        RunRow(
            id=key, project="vision", run="run", project_store_id=1, control={}, created_ns=0, last_seen_ns=0
        ),
        ActionRow(id=key, key="key", run_id=key, event_id="e", kind="webhook", payload={}, created_ns=0),
        Backtest(id=key, project="vision", runs=["run"], rules=[], sweeps=[], created_ns=0),
        Upkeep(run_id=key),
    ]


@pytest.fixture
def clocked(database: Database) -> Database:
    """A database with a row of each kind of work, whose clock stands still."""
    with database.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE lease_clock (now_ns BIGINT)")
        connection.exec_driver_sql(f"INSERT INTO lease_clock VALUES ({STARTED_NS})")
    replace_clock(database.engine, "(SELECT now_ns FROM lease_clock)")
    with database.write() as session:
        for row in rows_of(1):
            session.add(row)
            session.flush()
    return database


class LeaseMachine(RuleBasedStateMachine):
    """Workers that claim, renew, release, commit and are paused in any order, against the law."""

    row: Row
    tokens = Bundle("tokens")

    def __init__(self) -> None:
        super().__init__()
        self.row.free()
        self.current: int | None = None
        """Token of the claim that may write."""
        self.left = 0
        """Seconds until its deadline, 0 once that has passed or the row was released."""

    @rule(target=tokens, seconds=st.integers(1, 5))
    def claim(self, seconds: int) -> int | None:
        token = self.row.claim(seconds)
        assert (token is None) == (self.left > 0)
        if token is not None:
            assert token != self.current
            self.current, self.left = token, seconds
        return token

    @rule(token=tokens, seconds=st.integers(1, 5))
    def renew(self, token: int | None, seconds: int) -> None:
        if token is None:
            return
        renewed = self.row.renew(token, seconds)
        assert renewed == (token == self.current)
        if renewed:
            self.left = seconds
            if self.row.lease.epoch is None:
                self.current = self._deadline()

    @rule(token=tokens)
    def release(self, token: int | None) -> None:
        if token is None:
            return
        released = self.row.release(token)
        assert released == (token == self.current)
        if released:
            self.left = 0
            if self.row.lease.epoch is None:
                self.current = 0

    @rule(token=tokens)
    def commit(self, token: int | None) -> None:
        if token is not None:
            assert self.row.may_commit(token) == (token == self.current)

    @rule()
    def revoke(self) -> None:
        if self.row.lease.epoch is not None:
            with self.row.database.write() as session:
                self.row.lease.revoke(session, self.row.key)
            self.current, self.left = None, 0

    @rule()
    def expire(self) -> None:
        with self.row.database.write() as session:
            self.row.lease.expire_all(session, true())
        if self.row.lease.epoch is None and self.left:
            self.current = EXPIRED_NS
        self.left = 0

    @rule(seconds=st.integers(1, 4))
    def advance(self, seconds: int) -> None:
        self.row.advance(seconds)
        self.left = max(0, self.left - seconds)

    @invariant()
    def is_free_once_nobody_has_it(self) -> None:
        with self.row.database.read() as session:
            deadline, now = self._deadline(), read_clock(session)
        assert (deadline <= now) == (self.left == 0)

    def _deadline(self) -> int:
        with self.row.database.read() as session:
            return int(getattr(session.get_one(self.row.lease.model, self.row.key), self.row.lease.until))


@pytest.mark.parametrize("kind", LEASES)
def test_one_claim_at_most_is_current(clocked: Database, kind: str) -> None:
    machine = type("Machine", (LeaseMachine,), {"row": Row(clocked, LEASES[kind])})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=5, stateful_step_count=15, deadline=None)
    )


@pytest.mark.parametrize("kind", ["actions", "backtests"])
def test_what_is_done_is_not_claimed(clocked: Database, kind: str) -> None:
    row = Row(clocked, LEASES[kind])
    with clocked.write() as session:
        session.get_one(row.lease.model, 1).state = "done"
    assert row.claim(1) is None


def test_a_batch_is_claimed_once(clocked: Database) -> None:
    with clocked.write() as session:
        session.add(
            RunRow(
                id=2,
                project="vision",
                run="other",
                project_store_id=1,
                control={},
                created_ns=0,
                last_seen_ns=0,
            )
        )
    with clocked.write() as session:
        tokens = POLL_LEASE.claim_all(session, RunRow.id.in_([1, 2]), NANOSECONDS)
    assert tokens == {1: STARTED_NS + NANOSECONDS, 2: STARTED_NS + NANOSECONDS}
    with clocked.write() as session:
        assert POLL_LEASE.claim_all(session, RunRow.id.in_([1, 2]), NANOSECONDS) == {}


def deadline_of(driven: Driven, run_id: int) -> int:
    return driven.run(run_id).lease_until_ns


@contextmanager
def kept(driven: Driven, current: Claim) -> Iterator[None]:
    database = driven.service.database
    with keep_lease(LeasedRow(database, RUN_LEASE, current.run_id, current.epoch, SECONDS, "run")):
        yield


def test_what_takes_longer_than_a_lease_keeps_it(driven: Driven) -> None:
    driven = driven.with_settings(lease_seconds=SECONDS)
    recording, run_id = driven.begin()
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))

    def takes_long(point: str, subject: object) -> None:
        if point == "evaluate.read":
            assert isinstance(subject, Claim)
            before = deadline_of(driven, run_id)
            eventually(lambda: deadline_of(driven, run_id) > before + 2 * nanoseconds(SECONDS), 60)

    with listening(takes_long):
        assert driven.evaluate(run_id).outcome == "committed"
    assert deadline_of(driven, run_id) == 0
    assert driven.run(run_id).epoch == 1


def test_a_claim_that_another_has_taken_is_not_renewed(driven: Driven) -> None:
    driven.recording().begin()
    run_id = driven.register()
    first = claim(driven.service.database, run_id, 0)
    assert first is not None
    second = claim(driven.service.database, run_id, nanoseconds(3600.0))
    assert second is not None
    before = deadline_of(driven, run_id)
    with kept(driven, first):
        pass
    assert deadline_of(driven, run_id) == before


def test_a_lease_ends_when_nobody_keeps_it(driven: Driven) -> None:
    driven.recording().begin()
    run_id = driven.register()
    first = claim(driven.service.database, run_id, nanoseconds(3600.0))
    assert first is not None
    driven.change(RunRow, run_id, lease_until_ns=0)
    second = claim(driven.service.database, run_id, nanoseconds(3600.0))
    assert second is not None
    assert second.epoch == first.epoch + 1


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


@pytest.mark.ci
def test_new_runs_are_found_and_judged(timed: Driven, clock: Clock) -> None:
    timed.recording(run="before").begin()
    settle(timed)
    clock.move(-3600)
    timed.recording(run="after").begin().write_all([3, 7], nan_from(5))
    for _ in range(2):
        settle(timed)
        clock.move(2)
    assert timed.run(2).run == "after"
    assert timed.alerts(2)["non_finite_values"][:2] == ("firing", 5)


def test_what_nobody_announces_of_a_known_run_is_found(timed: Driven, clock: Clock) -> None:
    recording = timed.recording().begin()
    settle(timed)
    clock.move(40)
    settle(timed)
    clock.move(-3600)
    recording.write_all([3, 7], nan_from(5))
    for _ in range(3):
        settle(timed)
        clock.move(40)
    assert timed.alerts(1)["non_finite_values"][:2] == ("firing", 5)


def test_the_lease_of_a_dead_worker_ends(timed: Driven, clock: Clock) -> None:
    recording = timed.recording().begin()
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
        Attempt(run_id=1, attempt="z", world_size=1, on_stop="ignore", ranks={}, ends={}, context=[]),
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
        ranks = {0: RankProgress(9, 1), 1: RankProgress(4, last_seen_ns)}
        return AttemptProgress(2, 1, ranks, frozenset(), 4)

    assert decide(progress(HOUR), 0, SECOND) is not None
    assert decide(progress(SECOND), 0, SECOND) is None


def test_a_gap_that_was_found_in_the_future_is_not_waited_for() -> None:
    patience = GapTimeout(0, SECOND, listed=True)
    assert patience.over(Gap(WriterId("a1", "n", "w"), 0, 1, HOUR))
    assert not patience.over(Gap(WriterId("a1", "n", "w"), 0, 1, SECOND))
