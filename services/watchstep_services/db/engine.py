"""The database connection: SQLite when embedded, PostgreSQL in production.

Events get numbers that grow, within a project, in the order of commits, so that who has seen one has missed none before it. A sequence
alone does not give that: of two transactions, the one that took the lower number may commit last. So events are written at the very end of a
transaction, under a lock of their project, which holds until the commit is seen. SQLite has one writer at a time, and needs no lock.
"""

from __future__ import annotations

import functools
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, func, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DisconnectionError, OperationalError
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.limits import DatabaseTimeouts
from watchstep_services.db.models import Base, EventRow, RunRow

_BUSY_MS = 20_000
_PRIVATE = 0o600
_READ_ONLY = "watchstep_read_only"
_LEFT = "watchstep_left"
_TRUSTED_SECONDS = 1.0
_POOL, _OVERFLOW = 10, 30  # as many as the API has threads: none waits for another to give one back


@dataclass(frozen=True)
class Database:
    """Short transactions on one database. Thread-safe; open it after a fork, never before."""

    engine: Engine

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that commits at the end of the block, and rolls back when it raises."""
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            yield session
            write_events(session)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that only reads; on SQLite it takes no write lock."""
        with Session(self._reading, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def once(self) -> Iterator[Session]:
        """For one statement, which is a transaction by itself: on PostgreSQL one round trip instead of three."""
        if self.engine.dialect.name == "sqlite":
            with self.write() as session:
                yield session
            return
        with Session(self._reading, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def bare(self) -> Iterator[Connection]:
        """A connection without a session, for what every evaluation asks: finding out what objects changed costs more than that.

        On PostgreSQL each statement is a transaction by itself; on SQLite all of the block are one.
        """
        if self.engine.dialect.name == "sqlite":
            with self.engine.begin() as connection:
                yield connection
            return
        with self._reading.connect() as connection:
            yield connection

    @functools.cached_property
    def _reading(self) -> Engine:
        # PostgreSQL gives each statement its own view of the data, in a transaction or not; without one, nothing needs to
        # begin and end it.
        each = {} if self.engine.dialect.name == "sqlite" else {"isolation_level": "AUTOCOMMIT"}
        return self.engine.execution_options(**{_READ_ONLY: True, **each})

    @property
    def shown_url(self) -> str:
        """Its address without a password."""
        return self.engine.url.render_as_string(hide_password=True)

    def check(self) -> None:
        """Ask the database for an answer.

        Raises:
            ConfigError: it does not answer.
        """
        try:
            with self.engine.connect() as connection:
                connection.exec_driver_sql("SELECT 1")
        except OperationalError as error:
            shown = self.engine.url.render_as_string(hide_password=True)
            raise ConfigError(
                f"database {shown}: does not answer ({error.orig})",
                "check WATCHSTEP_DATABASE_URL and that the database runs",
            ) from error

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def open_database(url: str, limits: DatabaseTimeouts | None = None) -> Database:
    """Open a database by its SQLAlchemy URL; ``postgresql://`` uses psycopg.

    Args:
        url: where it is; what its query says of time-outs holds.
        limits: how long PostgreSQL and this process wait for each other; the defaults where None.

    Raises:
        ConfigError: the URL cannot be used.
    """
    try:
        parsed = make_url(url)
        if parsed.drivername in {"postgresql", "postgres"}:
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() not in {"sqlite", "postgresql"}:
            raise ConfigError(
                f"database {parsed.render_as_string(hide_password=True)}: not supported",
                "use sqlite:///PATH or postgresql://USER@HOST/NAME in WATCHSTEP_DATABASE_URL",
            )
        if parsed.get_backend_name() == "sqlite" and parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        # Values of statements are in no error: some of them are secrets.
        waits = (
            {}
            if parsed.get_backend_name() == "sqlite"
            else (limits or DatabaseTimeouts()).connect_args(parsed.query)
        )
        engine = create_engine(
            parsed, pool_size=_POOL, max_overflow=_OVERFLOW, hide_parameters=True, connect_args=waits
        )
    except (ArgumentError, ModuleNotFoundError, OSError) as error:
        raise ConfigError(
            f"database {url.rsplit('@', maxsplit=1)[-1]!r}: {error}",
            "use sqlite:///PATH, or postgresql://USER@HOST/NAME with watchstep[production] installed",
        ) from error
    count_connections(engine)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "do_connect", _keep_private)
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    else:
        event.listen(engine, "checkin", _left)
        event.listen(engine, "checkout", functools.partial(_ask_if_idle, engine))
    return Database(engine)


def _keep_private(_dialect: Any, _record: Any, arguments: tuple[Any, ...], _options: Any) -> None:
    """Before each connection: make a SQLite file that its owner alone may read, or make one that exists so, with the files beside it.

    SQLite gives the files beside it the mode of the database.

    Raises:
        OSError: it cannot be made, or belongs to another user.
    """
    file = Path(str(arguments[0]))
    if str(file) == ":memory:" or str(file).startswith("file:"):
        return
    # A file that exists is never opened here: closing any descriptor of it would drop the locks that this process's other
    # connections hold on it, and another process would then remove the write-ahead log beneath them.
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE))
    for suffix in ("", "-wal", "-shm", "-journal"):
        beside = file.with_name(file.name + suffix)
        with suppress(FileNotFoundError):
            if stat.S_IMODE(beside.stat().st_mode) != _PRIVATE:
                beside.chmod(_PRIVATE)


def _left(_connection: Any, record: Any) -> None:
    record.info[_LEFT] = time.monotonic()


def _ask_if_idle(engine: Engine, connection: Any, record: Any, _proxy: Any) -> None:
    """A connection that was not used for some time may be gone; one that just was is not asked each time."""
    left = record.info.get(_LEFT)
    if left is None or time.monotonic() - left < _TRUSTED_SECONDS:
        return
    try:
        engine.dialect.do_ping(connection)
    except engine.dialect.loaded_dbapi.Error as error:
        raise DisconnectionError from error  # the pool opens another


def _configure_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun by _begin_sqlite, not by the driver
    for pragma in (
        f"busy_timeout = {_BUSY_MS}",
        "journal_mode = WAL",
        "synchronous = NORMAL",
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that reads first and writes later can fail with SQLITE_BUSY whatever the timeout.
    only_reads = connection.get_execution_options().get(_READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")


def count_connections(engine: Engine) -> None:
    """Keep ``watchstep_database_connections`` up to date for an engine."""
    opened, used = metrics.CONNECTIONS.labels("open"), metrics.CONNECTIONS.labels("in_use")

    def invalidated(_connection: Any, _record: Any, error: BaseException | None) -> None:
        if error is not None:
            metrics.CONNECTION_FAILURES.inc()

    event.listen(engine, "connect", lambda _connection, _record: opened.inc())
    event.listen(engine, "close", lambda _connection, _record: opened.dec())
    event.listen(engine, "checkout", lambda _connection, _record, _proxy: used.inc())
    event.listen(engine, "checkin", lambda _connection, _record: used.dec())
    event.listen(engine, "invalidate", invalidated)


_EVENTS = "watchstep_events"
_LOCK = 7_201_948  # the first half of the lock's name; any number, as long as it stays

_TAKE = text("SELECT pg_advisory_xact_lock(:lock, :project)")


def publish_at_end(session: Session, event: EventRow) -> None:
    """Write an event when its transaction ends, after everything else; in the order of the calls."""
    session.info.setdefault(_EVENTS, []).append(event)


def write_events(session: Session) -> None:
    """Write what `publish_at_end` was given. `Database.write` does it; nothing may follow but the commit."""
    events: list[EventRow] = session.info.pop(_EVENTS, [])
    if not events or not session.in_transaction():
        return
    session.flush()
    if session.get_bind().dialect.name == "postgresql":
        _lock(session, {event.run_id for event in events})
    session.add_all(events)
    session.flush()


def _lock(session: Session, run_ids: set[int]) -> None:
    """In one order, lest two transactions with events of two projects wait for each other."""
    projects = session.execute(
        select(func.hashtext(RunRow.project)).where(RunRow.id.in_(run_ids)).distinct()
    ).scalars()
    for project in sorted(projects):
        session.execute(_TAKE, {"lock": _LOCK, "project": project})


def insert_missing(session: Session, model: type[Base], values: dict[str, Any]) -> bool:
    """Insert one row; False where a unique key is taken, which is left as it is."""
    insert: Any = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    table = model.__table__
    statement = insert(table).values(values).on_conflict_do_nothing().returning(*table.primary_key)
    return session.execute(statement).first() is not None
