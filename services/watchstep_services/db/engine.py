"""The database connection: SQLite when embedded, PostgreSQL in production.

Within a project, events are numbered in the order of commits, so that a client that has seen one has missed none before it. A sequence
alone does not guarantee that: of two transactions, the one with the lower number may commit last. So events are written at the end of a
transaction, under a lock of their project that is released by the commit. SQLite has one writer at a time, and needs no lock.

Timeouts between PostgreSQL and this process, so that neither a hanging client nor a dead network holds locks indefinitely.

SQLite needs none: its locks are locks of the file, which end with the process that holds them. The threads of a process take its write
lock in the order in which they ask for it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, create_engine, event, func, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, InterfaceError, OperationalError
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.models import Base, EventRow, RunRow

if TYPE_CHECKING:
    from watchstep_services.core.settings import Settings


_log = logging.getLogger(__name__)

_PROBES = 3
"""Failed keepalive probes after which a connection is closed."""

_STRUCK = {"57014", "55P03", "25P03"}
"""SQLSTATEs of a statement timeout, a lock timeout, and an idle transaction."""


_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
_REFUSED = re.compile(
    r"FATAL:(?!.*(starting up|shutting down|recovery|not yet accepting|too many))", re.DOTALL
)
"""An answer of PostgreSQL that does not change while it starts."""


@dataclass(frozen=True)
class DatabaseTimeouts:
    """Timeouts in seconds; 0 leaves a timeout to the server and the operating system.

    Attributes:
        connect: for a new connection.
        dead: without an answer from the other side's operating system, after which both sides close the connection.
        statement: for one statement, including its wait for locks.
        lock: for one wait for a lock.
        idle: for an open transaction without a statement; then the server rolls it back and closes the connection.
    """

    connect: float = 10.0
    dead: float = 60.0
    statement: float = 30.0
    lock: float = 10.0
    idle: float = 30.0

    @classmethod
    def of(cls, settings: Settings) -> DatabaseTimeouts:
        """The timeouts of the settings."""
        return cls(
            connect=settings.database_connect_seconds,
            dead=settings.database_dead_seconds,
            statement=settings.database_statement_seconds,
            lock=settings.database_lock_seconds,
            idle=settings.database_idle_seconds,
        )

    def connect_args(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of libpq for each connection.

        Args:
            query: parameters in the database's URL, which take precedence.
        """
        ours: dict[str, Any] = {}
        if self.connect:
            ours["connect_timeout"] = max(2, round(self.connect))  # libpq treats 1 as 2
        if self.dead:
            ours |= {
                "keepalives": 1,
                "keepalives_idle": _whole(self.dead / 2),
                "keepalives_interval": _whole(self.dead / 2 / _PROBES),
                "keepalives_count": _PROBES,
                "tcp_user_timeout": _milliseconds(self.dead),
            }
        ours = {name: value for name, value in ours.items() if name not in query}
        options = " ".join(
            [*(f"-c {name}={value}" for name, value in self._server().items()), str(query.get("options", ""))]
        ).strip()
        return ours | ({"options": options} if options else {})

    def _server(self) -> dict[str, int]:
        connection = {
            "statement_timeout": _milliseconds(self.statement),
            "lock_timeout": _milliseconds(self.lock),
            "idle_in_transaction_session_timeout": _milliseconds(self.idle),
        }
        if self.dead:  # releases the locks of a client with a dead machine
            connection |= {
                "tcp_keepalives_idle": _whole(self.dead / 2),
                "tcp_keepalives_interval": _whole(self.dead / 2 / _PROBES),
                "tcp_keepalives_count": _PROBES,
                "tcp_user_timeout": _milliseconds(self.dead),
            }
        return {name: value for name, value in connection.items() if value}


def is_timeout(error: BaseException) -> bool:
    """Whether the server ended one statement or transaction by a timeout; it still answers others."""
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in _STRUCK


def is_of_all(error: BaseException) -> bool:
    """Whether an error means that the database does not answer, so that other statements would fail, too."""
    return isinstance(error, (OperationalError, InterfaceError)) and not is_timeout(error)


def lift(connection: Session | Connection) -> None:
    """Disable the timeouts of statements and locks for the rest of a transaction, for migrations and large deletions.

    The timeout of an idle transaction still applies.
    """
    bind = connection.get_bind() if isinstance(connection, Session) else connection
    if bind.dialect.name != "postgresql":
        return
    for name in ("statement_timeout", "lock_timeout"):
        connection.execute(text(f"SET LOCAL {name} = 0"))


def _whole(seconds: float) -> int:
    return max(1, round(seconds))


def _milliseconds(seconds: float) -> int:
    return 0 if not seconds else max(1, round(seconds * 1000))


_BUSY_MS = 20_000
_PRIVATE = 0o600
_READ_ONLY = "watchstep_read_only"
_RETURNED = "watchstep_returned"
_TRUSTED_SECONDS = 1.0
_POOL, _OVERFLOW = 10, 30  # as many as the API has threads, so that no thread waits for a connection


@dataclass(frozen=True)
class Database:
    """Short transactions on one database. Thread-safe; must be opened after a fork."""

    engine: Engine

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that commits at the end of the block, and rolls back on an exception."""
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
        """A session for one statement, which is a transaction by itself: on PostgreSQL one round trip instead of three."""
        if self.engine.dialect.name == "sqlite":
            with self.write() as session:
                yield session
            return
        with Session(self._reading, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def bare(self) -> Iterator[Connection]:
        """A connection without an ORM session, for statements of every evaluation, because a session costs more than they do.

        On PostgreSQL each statement is a transaction by itself; on SQLite the block is one transaction.
        """
        if self.engine.dialect.name == "sqlite":
            with self.engine.begin() as connection:
                yield connection
            return
        with self._reading.connect() as connection:
            yield connection

    @functools.cached_property
    def _reading(self) -> Engine:
        # PostgreSQL gives each statement its own snapshot with or without a transaction; without one, the statements
        # that begin and end it are saved.
        options = {} if self.engine.dialect.name == "sqlite" else {"isolation_level": "AUTOCOMMIT"}
        return self.engine.execution_options(**{_READ_ONLY: True, **options})

    @property
    def shown_url(self) -> str:
        """The database's URL without its password."""
        return self.engine.url.render_as_string(hide_password=True)

    def check(self) -> None:
        """Check that the database answers.

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

    def wait(self, seconds: float) -> None:
        """Check that the database answers, and wait for it while it starts.

        Args:
            seconds: how long to wait. An answer that refuses the connection, for example for a wrong password, is not waited for.

        Raises:
            ConfigError: it does not answer.
        """
        deadline = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        while True:
            try:
                return self.check()
            except ConfigError as error:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or _REFUSED.search(error.what):
                    raise
                if pause == _FIRST_PAUSE:
                    _log.warning("%s; trying again for %.0f s", error.what, seconds)
            time.sleep(min(pause, remaining))
            pause = min(_LONGEST_PAUSE, 2 * pause)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def open_database(url: str, limits: DatabaseTimeouts | None = None) -> Database:
    """Open a database by its SQLAlchemy URL; ``postgresql://`` uses psycopg.

    Args:
        url: the URL; timeouts in its query take precedence.
        limits: timeouts between PostgreSQL and this process; None for the defaults.

    Raises:
        ConfigError: the URL is not valid.
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
        # Errors do not contain the parameters of statements, because some are secrets.
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
        event.listen(engine, "begin", functools.partial(_begin_sqlite, _Queue(_BUSY_MS / 1000)))
    else:
        event.listen(engine, "checkin", _record_return)
        event.listen(engine, "checkout", functools.partial(_ping_if_idle, engine))
    return Database(engine)


def _keep_private(_dialect: Any, _record: Any, arguments: tuple[Any, ...], _options: Any) -> None:
    """Before each connection: create a SQLite file that only its owner may read, or restrict an existing one and its companion files.

    SQLite creates the companion files with the database's mode.

    Raises:
        OSError: it cannot be created, or belongs to another user.
    """
    file = Path(str(arguments[0]))
    if str(file) == ":memory:" or str(file).startswith("file:"):
        return
    # An existing file is not opened here: closing any descriptor of it would drop the locks of this process's other
    # connections, and another process would then remove the write-ahead log while it is in use.
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE))
    for suffix in ("", "-wal", "-shm", "-journal"):
        companion = file.with_name(file.name + suffix)
        with suppress(FileNotFoundError):
            if stat.S_IMODE(companion.stat().st_mode) != _PRIVATE:
                companion.chmod(_PRIVATE)


def _record_return(_connection: Any, record: Any) -> None:
    record.info[_RETURNED] = time.monotonic()


def _ping_if_idle(engine: Engine, connection: Any, record: Any, _proxy: Any) -> None:
    """Ping a connection that was idle, because it may be closed; one that was just used is not pinged."""
    returned = record.info.get(_RETURNED)
    if returned is None or time.monotonic() - returned < _TRUSTED_SECONDS:
        return
    try:
        engine.dialect.do_ping(connection)
    except engine.dialect.loaded_dbapi.Error as error:
        raise DisconnectionError from error  # the pool then opens another connection


def _configure_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun by _begin_sqlite, not by the driver
    for pragma in (
        f"busy_timeout = {_BUSY_MS}",
        "journal_mode = WAL",
        "synchronous = NORMAL",
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


class _Queue:
    """Threads that wait for SQLite's write lock, of which the first one tries to take it. Thread-safe.

    SQLite tries less and less often the longer a thread has waited, so that threads that have just come would overtake it:
    one project's requests would delay the evaluations of all others.

    Args:
        seconds: time after which a thread no longer waits for those before it, and tries, too.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Wait until this thread is the first, and remain it during the block."""
        own = threading.Event()
        with self._lock:
            self._waiting.append(own)
            self._waiting[0].set()
        try:
            own.wait(self._seconds)
            yield
        finally:
            with self._lock:
                self._waiting.remove(own)
                if self._waiting:
                    self._waiting[0].set()


def _begin_sqlite(queue: _Queue, connection: Connection) -> None:
    if connection.get_execution_options().get(_READ_ONLY, False):
        connection.exec_driver_sql("BEGIN")
        return
    # A deferred transaction that reads first and writes later can fail with SQLITE_BUSY, whatever the timeout.
    with queue.first():
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def count_connections(engine: Engine) -> None:
    """Keep ``watchstep_database_connections`` up to date for an engine."""
    idle, in_use = metrics.CONNECTIONS.labels("idle"), metrics.CONNECTIONS.labels("in_use")

    def invalidated(_connection: Any, _record: Any, error: BaseException | None) -> None:
        if error is not None:
            metrics.CONNECTION_FAILURES.inc()

    def checked_out(_connection: Any, _record: Any, _proxy: Any) -> None:
        idle.dec()
        in_use.inc()

    def checked_in(_connection: Any, _record: Any) -> None:
        in_use.dec()
        idle.inc()

    event.listen(engine, "connect", lambda _connection, _record: idle.inc())
    event.listen(engine, "close", lambda _connection, _record: idle.dec())
    event.listen(engine, "checkout", checked_out)
    event.listen(engine, "checkin", checked_in)
    event.listen(engine, "invalidate", invalidated)


_EVENTS = "watchstep_events"
_LOCK = 7_201_948  # the first half of the lock's id; an arbitrary number that must not change

_TAKE = text("SELECT pg_advisory_xact_lock(:lock, :project)")


def publish_at_end(session: Session, event: EventRow) -> None:
    """Write an event at the end of the transaction, after everything else, in the order of the calls."""
    session.info.setdefault(_EVENTS, []).append(event)


def write_events(session: Session) -> None:
    """Write the events of `publish_at_end`. `Database.write` calls it; only the commit may follow."""
    events: list[EventRow] = session.info.pop(_EVENTS, [])
    if not events or not session.in_transaction():
        return
    session.flush()
    if session.get_bind().dialect.name == "postgresql":
        _lock(session, {event.run_id for event in events})
    session.add_all(events)
    session.flush()


def _lock(session: Session, run_ids: set[int]) -> None:
    """Lock projects in one order, so that two transactions with events of two projects do not deadlock."""
    projects = session.execute(
        select(func.hashtext(RunRow.project)).where(RunRow.id.in_(run_ids)).distinct()
    ).scalars()
    for project in sorted(projects):
        session.execute(_TAKE, {"lock": _LOCK, "project": project})


def insert_missing(session: Session, model: type[Base], values: dict[str, Any]) -> bool:
    """Insert one row; return False if a unique key exists, which leaves its row unchanged."""
    statement = _insert_new(session, model).values(values).returning(*model.__table__.primary_key)
    return session.execute(statement).first() is not None


def insert_all_missing(session: Session, model: type[Base], rows: Sequence[dict[str, Any]]) -> int:
    """As `insert_missing`, for several rows; return how many were inserted."""
    statement = _insert_new(session, model).execution_options(preserve_rowcount=True)
    inserted: int = session.connection().execute(statement, rows).rowcount
    return inserted


def _insert_new(session: Session, model: type[Base]) -> Any:
    insert: Any = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    return insert(model.__table__).on_conflict_do_nothing()
