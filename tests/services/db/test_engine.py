"""Databases: connections, time limits, and the order of events."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from tests.services.driving import Driven, make_service
from tests.services.postgres import Postgres
from tests.services.recording import Recording, nan_from
from watchstep.errors import ConfigError
from watchstep.store.store import Store
from watchstep_services.core import failpoints
from watchstep_services.core.events import make_event
from watchstep_services.core.settings import load_settings
from watchstep_services.db.engine import Database, DatabaseTimeouts, insert_missing, lift, open_database
from watchstep_services.db.models import EventRow, Project, RunRow
from watchstep_services.db.records import add_event
from watchstep_services.db.schema import upgrade
from watchstep_services.runs.registration import register

ROW = {"name": "vision", "description": "images"}
PATIENCE = 60.0
IDLE = "idle_in_transaction_session_timeout"
SHORT = DatabaseTimeouts(statement=5.0, lock=0.2, idle=1.0)
WAIT = 60.0


def test_a_row_is_inserted_once(database: Database) -> None:
    with database.write() as session:
        assert insert_missing(session, Project, ROW)
        assert not insert_missing(session, Project, {**ROW, "description": "other"})
    with database.read() as session:
        assert session.execute(select(Project.description)).scalar_one() == "images"


REFUSALS = {
    "connection refused": True,
    'connection to server at "127.0.0.1", port 5432 failed: FATAL:  the database system is starting up': True,
    "FATAL:  the database system is not yet accepting connections\nDETAIL:  Consistent recovery state has not been yet reached.": True,
    "FATAL:  sorry, too many clients already": True,
    'FATAL:  password authentication failed for user "watchstep"': False,
    'FATAL:  database "watchstep" does not exist': False,
}


def test_a_writer_waits_for_no_more_than_those_before_it(sqlite: Database) -> None:
    """SQLite by itself lets threads that have just come overtake those that wait."""
    others, begun, over = 6, [0], threading.Event()

    def write() -> None:
        with sqlite.write() as session:
            session.execute(text("SELECT 1"))
            begun[0] += 1
            over.wait(0.005)

    def write_always() -> None:
        while not over.is_set():
            write()

    threads = [threading.Thread(target=write_always) for _ in range(others)]
    for thread in threads:
        thread.start()
    overtaken = []
    for _ in range(20):
        before = begun[0]
        write()
        overtaken.append(begun[0] - before - 1)
    over.set()
    for thread in threads:
        thread.join()
    assert max(overtaken) <= 2 * others


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_database_that_starts_is_waited_for(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    database = open_database(f"sqlite:///{tmp_path}/database")
    answers = [ConfigError(f"database d: does not answer ({reason})", "check it")] * 3
    pauses: list[float] = []

    def check(_database: Database) -> None:
        if answers:
            raise answers.pop()

    monkeypatch.setattr(Database, "check", check)
    monkeypatch.setattr("watchstep_services.db.engine.time.sleep", pauses.append)
    if not REFUSALS[reason]:
        with pytest.raises(ConfigError, match="does not answer"):
            database.wait(60)
        assert (len(answers), pauses) == (2, [])
        return
    database.wait(60)
    assert pauses == [0.25, 0.5, 1.0]
    assert [record.message for record in caplog.records] == [
        f"database d: does not answer ({reason}); trying again for 60 s"
    ]
    answers = [ConfigError(f"database d: does not answer ({reason})", "check it")]
    with pytest.raises(ConfigError, match="does not answer"):
        database.wait(0)


def test_a_transaction_that_raises_leaves_nothing(database: Database) -> None:
    def write_twice() -> None:
        with database.write() as session:
            insert_missing(session, Project, ROW)
            session.add(Project(**ROW))

    with pytest.raises(IntegrityError):
        write_twice()
    with database.read() as session:
        assert session.execute(select(Project)).first() is None


def test_reading_goes_on_while_another_writes(database: Database) -> None:
    with database.write() as writing:
        insert_missing(writing, Project, ROW)
        with database.read() as session:
            assert session.execute(select(Project)).first() is None


@pytest.mark.parametrize("url", ["mysql://host/name", "nonsense", "sqlite:////proc/none/x.sqlite"])
def test_a_url_that_cannot_be_used_says_so(url: str) -> None:
    with pytest.raises(ConfigError):
        open_database(url)


def test_a_password_is_not_told() -> None:
    database = open_database("postgresql://user:secret@127.0.0.1:1/none")
    with pytest.raises(ConfigError, match="does not answer") as caught:
        database.check()
    assert "secret" not in str(caught.value)
    database.close()


def test_a_further_connection_keeps_the_locks_of_those_that_are_open(tmp_path: Path) -> None:
    file = tmp_path / "watchstep.sqlite"
    opened = open_database(f"sqlite:///{file}")
    log = file.with_name(file.name + "-wal")
    with opened.engine.connect() as first:
        first.execute(text("CREATE TABLE facts (value INTEGER)"))
        first.commit()
        with opened.engine.connect() as second:
            second.execute(text("SELECT * FROM facts"))
        before = log.stat().st_ino
        # The last process that closes a database removes its write-ahead log, if it sees no locks of others.
        program = (
            "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]);"
            " c.execute('INSERT INTO facts VALUES (1)'); c.commit(); c.close()"
        )
        subprocess.run([sys.executable, "-c", program, file], check=True, timeout=600)
        assert log.exists()
        assert log.stat().st_ino == before
        assert first.execute(text("SELECT value FROM facts")).scalar_one() == 1
    opened.close()


@contextmanager
def opened(postgres: Postgres, limits: DatabaseTimeouts) -> Iterator[Database]:
    with postgres.new_database() as url:
        database = open_database(url, limits)
        yield database
        database.close()


def shown(database: Database, name: str) -> str:
    with database.read() as session:
        return str(session.execute(text(f"SHOW {name}")).scalar_one())


@pytest.mark.ci
def test_connections_have_the_limits_of_the_settings(postgres: Postgres) -> None:
    settings = load_settings(
        database_statement_seconds=7,
        database_lock_seconds=3,
        database_idle_seconds=9,
        database_dead_seconds=60,
    )
    with opened(postgres, DatabaseTimeouts.of(settings)) as database:
        assert shown(database, "statement_timeout") == "7s"
        assert shown(database, "lock_timeout") == "3s"
        assert shown(database, "idle_in_transaction_session_timeout") == "9s"
        with database.engine.connect() as connection:
            driver: Any = connection.connection.dbapi_connection
            parameters = driver.info.get_parameters()
        wanted = {"keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3"}
        assert parameters.items() >= {**wanted, "tcp_user_timeout": "60000", "connect_timeout": "10"}.items()


def test_the_servers_own_limits_hold_where_a_setting_is_0(postgres: Postgres) -> None:
    with opened(postgres, DatabaseTimeouts(0, 0, 0, 0, 0)) as database:
        assert shown(database, "lock_timeout") == "0"
        with database.engine.connect() as connection:
            driver: Any = connection.connection.dbapi_connection
            assert "options" not in driver.info.get_parameters()


def test_what_the_address_says_holds() -> None:
    arguments = DatabaseTimeouts(lock=3).connect_args(
        {"connect_timeout": "4", "options": "-c lock_timeout=5s"}
    )
    assert "connect_timeout" not in arguments
    assert arguments["options"].index("lock_timeout=3000") < arguments["options"].index("lock_timeout=5s")


def test_migrations_and_large_deletions_take_the_time_that_they_need(postgres: Postgres) -> None:
    with opened(postgres, SHORT) as database:
        with database.write() as session:
            lift(session)
            assert session.execute(text("SHOW statement_timeout")).scalar_one() == "0"
            assert session.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one() == "1s"
        assert shown(database, "lock_timeout") == "200ms"


def test_a_statement_that_takes_too_long_is_ended(postgres: Postgres) -> None:
    with opened(postgres, DatabaseTimeouts(statement=0.1)) as database:
        with database.read() as session, pytest.raises(OperationalError, match="statement timeout"):
            session.execute(select(func.pg_sleep(PATIENCE)))
        database.check()


def test_a_server_that_does_not_answer_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections, says nothing
        url = f"postgresql://watchstep@127.0.0.1:{deaf.getsockname()[1]}/watchstep"
        database = open_database(url, DatabaseTimeouts(connect=2))
        with pytest.raises(ConfigError, match="does not answer"):
            database.check()
        database.close()


def test_an_evaluation_outlives_a_client_that_hangs_with_its_run(
    postgres: Postgres, folder_store: Store
) -> None:
    """It gives up, the server ends the other, and when its lease is over the run is judged as if nothing had been."""
    recording = Recording(folder_store).begin()
    patient = DatabaseTimeouts(statement=PATIENCE, lock=0.2, idle=PATIENCE)
    with postgres.new_database() as url, ExitStack() as opened_here:
        database = open_database(url, patient)
        opened_here.callback(database.close)
        upgrade(database)
        hanging = open_database(url, SHORT)
        opened_here.callback(hanging.close)
        hung = opened_here.enter_context(ExitStack())
        driven = Driven(make_service(database, folder_store, lease_seconds=1.0))
        run_id = driven.register()
        driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))

        def hang(point: str, _subject: object) -> None:
            if point == "evaluate.judged" and not held:
                session = hung.enter_context(hanging.read())
                connection = session.connection(execution_options={"isolation_level": "READ COMMITTED"})
                # The limit counts from when the evaluation has met the client, however long that takes.
                connection.execute(text(f"SET {IDLE} = 0"))
                connection.execute(select(RunRow.id).where(RunRow.id == run_id).with_for_update())
                held.append(connection)

        held: list[Any] = []
        with failpoints.listening(hang), pytest.raises(OperationalError, match="lock timeout"):
            driven.evaluate(run_id)
        assert driven.run(run_id).ticks == 0
        held[0].execute(text(f"RESET {IDLE}"))
        assert held[0].execute(text(f"SHOW {IDLE}")).scalar_one() == "1s"
        assert outcome_at_last(driven, run_id) == "committed"
        with pytest.raises(DBAPIError, match=r"idle-in-transaction|closed"):
            held[0].execute(text("SELECT 1"))
        assert driven.run(run_id).ticks == 1
        assert driven.event_types(run_id).count("alert.firing") == 1


def outcome_at_last(driven: Driven, run_id: int) -> str:
    """What the first evaluation came to that got hold of the run."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            outcome = driven.evaluate(run_id).outcome
        except OperationalError:  # it waited for the client that hangs
            continue
        if outcome != "busy":
            return outcome
    return "never"


def publish(database: Database, run_id: int, project: str = "vision") -> None:
    with database.write() as session:
        add_event(
            session, run_id, make_event("io.watchstep.run.started", "http://s", (project, "r"), 1, {}), 1
        )


def numbers(database: Database) -> list[int]:
    with database.read() as session:
        return list(session.execute(select(EventRow.number).order_by(EventRow.number)).scalars())


def test_a_number_is_never_given_again(driven: Driven) -> None:
    database = driven.service.database
    run_id = driven.register()
    publish(database, run_id)
    publish(database, run_id)
    last = numbers(database)[-1]
    with database.write() as session:
        session.execute(delete(EventRow))
    publish(database, run_id)
    assert numbers(database)[0] > last


def test_who_follows_misses_nothing_of_writers_that_cross(driven: Driven) -> None:
    database = driven.service.database
    runs = [driven.register(f"run-{n}") for n in range(4)]
    writers = [threading.Thread(target=_many, args=(database, run_id)) for run_id in runs]
    seen: list[int] = []

    def follow() -> None:
        last = 0
        while len(seen) < 40:
            with database.read() as session:
                new = session.execute(
                    select(EventRow.number).where(EventRow.number > last).order_by(EventRow.number)
                )
                numbers = list(new.scalars())
            seen.extend(numbers)
            last = max([last, *numbers])

    follower = threading.Thread(target=follow, daemon=True)
    for thread in (follower, *writers):
        thread.start()
    for thread in writers:
        thread.join(WAIT)
    follower.join(WAIT)
    assert seen == numbers(database)
    assert len(seen) == 40


def _many(database: Database, run_id: int) -> None:
    for _ in range(10):
        with database.write() as session:
            event = make_event("io.watchstep.run.started", "http://s", ("vision", "r"), 1, {})
            add_event(session, run_id, event, 1)
            # What a transaction does after it has said what it will publish.
            session.execute(update(RunRow).where(RunRow.id == run_id).values(hints=RunRow.hints + 1))


def test_a_transaction_that_is_open_holds_up_no_other_of_another_project(driven: Driven) -> None:
    database = driven.service.database
    if database.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer")
    ours = driven.register()
    theirs = register(driven.service, "language", "r", (), "recorder")
    written, go = threading.Event(), threading.Event()

    def slow() -> None:
        from watchstep_services.db.engine import write_events

        with database.write() as session:
            add_event(
                session, ours, make_event("io.watchstep.run.started", "http://s", ("vision", "r"), 1, {}), 1
            )
            write_events(session)
            written.set()
            assert go.wait(WAIT)

    thread = threading.Thread(target=slow)
    thread.start()
    assert written.wait(WAIT)
    publish(database, theirs, "language")
    assert len(numbers(database)) == 1
    go.set()
    thread.join(WAIT)
    assert len(numbers(database)) == 2
