"""PostgreSQL gives nobody a row for ever: neither a client that hangs nor one that waits for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError, OperationalError

from tests.services.driving import Driven, make_service
from tests.services.postgres import Postgres
from tests.services.recording import Recording, nan_from
from watchstep.errors import ConfigError
from watchstep.store.store import Store
from watchstep_services.core import failpoints
from watchstep_services.core.settings import load_settings
from watchstep_services.db.engine import Database, DatabaseTimeouts, lift, open_database
from watchstep_services.db.models import RunRow
from watchstep_services.db.schema import upgrade

PATIENCE = 60.0
IDLE = "idle_in_transaction_session_timeout"
SHORT = DatabaseTimeouts(statement=5.0, lock=0.2, idle=1.0)


@contextmanager
def opened(postgres: Postgres, limits: DatabaseTimeouts) -> Iterator[Database]:
    with postgres.new_database() as url:
        database = open_database(url, limits)
        yield database
        database.close()


def shown(database: Database, name: str) -> str:
    with database.read() as session:
        return str(session.execute(text(f"SHOW {name}")).scalar_one())


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
