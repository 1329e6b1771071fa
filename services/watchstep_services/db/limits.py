"""Timeouts between PostgreSQL and this process, so that neither a hanging client nor a dead network holds locks indefinitely.

SQLite needs none: its locks are locks of the file, which end with the process that holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.orm import Session

if TYPE_CHECKING:
    from watchstep_services.core.settings import Settings

_PROBES = 3
"""Failed keepalive probes after which a connection is closed."""

_STRUCK = {"57014", "55P03", "25P03"}
"""SQLSTATEs of a statement timeout, a lock timeout, and an idle transaction."""


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
