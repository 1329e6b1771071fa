"""How long PostgreSQL and this process wait for each other: no client that hangs, and no dead network, holds a row for ever.

SQLite needs none of it: who waits there waits for a lock of the file, which ends with the process that holds it.
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
"""Signs of life that fail before a connection is given up."""

_STRUCK = {"57014", "55P03", "25P03"}
"""States of SQL: a statement took too long, a lock was not given, a transaction stood idle."""


@dataclass(frozen=True)
class DatabaseTimeouts:
    """Seconds; 0 leaves a limit to the server and the operating system.

    Attributes:
        connect: for a new connection.
        dead: without an answer from the other side's operating system, before a connection is given up: by both sides.
        statement: for one statement, its wait for locks included.
        lock: for one wait for a lock.
        idle: that a transaction may stand open with nothing asked; then the server rolls it back and closes the connection.
    """

    connect: float = 10.0
    dead: float = 60.0
    statement: float = 30.0
    lock: float = 10.0
    idle: float = 30.0

    @classmethod
    def of(cls, settings: Settings) -> DatabaseTimeouts:
        """As the settings say."""
        return cls(
            connect=settings.database_connect_seconds,
            dead=settings.database_dead_seconds,
            statement=settings.database_statement_seconds,
            lock=settings.database_lock_seconds,
            idle=settings.database_idle_seconds,
        )

    def connect_args(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What libpq is told at each connection.

        Args:
            given: what the database's URL says itself, which holds.
        """
        ours: dict[str, Any] = {}
        if self.connect:
            ours["connect_timeout"] = max(2, round(self.connect))  # libpq takes less for 2
        if self.dead:
            ours |= {
                "keepalives": 1,
                "keepalives_idle": _whole(self.dead / 2),
                "keepalives_interval": _whole(self.dead / 2 / _PROBES),
                "keepalives_count": _PROBES,
                "tcp_user_timeout": _milliseconds(self.dead),
            }
        ours = {name: value for name, value in ours.items() if name not in given}
        options = " ".join(
            [*(f"-c {name}={value}" for name, value in self._server().items()), str(given.get("options", ""))]
        ).strip()
        return ours | ({"options": options} if options else {})

    def _server(self) -> dict[str, int]:
        connection = {
            "statement_timeout": _milliseconds(self.statement),
            "lock_timeout": _milliseconds(self.lock),
            "idle_in_transaction_session_timeout": _milliseconds(self.idle),
        }
        if self.dead:  # a client whose machine is gone: its locks go, too
            connection |= {
                "tcp_keepalives_idle": _whole(self.dead / 2),
                "tcp_keepalives_interval": _whole(self.dead / 2 / _PROBES),
                "tcp_keepalives_count": _PROBES,
                "tcp_user_timeout": _milliseconds(self.dead),
            }
        return {name: value for name, value in connection.items() if value}


def struck(error: BaseException) -> bool:
    """Whether the server ended one statement or transaction that took too long: it answers, and others go on."""
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in _STRUCK


def is_of_all(error: BaseException) -> bool:
    """Whether an error says that the database does not answer: whatever else is asked of it meets the same."""
    return isinstance(error, (OperationalError, InterfaceError)) and not struck(error)


def lift(connection: Session | Connection) -> None:
    """For the rest of a transaction: statements may take, and wait, as long as they need. For migrations and large deletions.

    One whose client hangs between two statements is still ended.
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
