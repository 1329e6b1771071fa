"""Migrations of the database's schema, and its status."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from watchstep.errors import ConfigError
from watchstep_services.core.settings import Settings
from watchstep_services.db.engine import Database, lift

MIGRATIONS = resources.files("watchstep_services.db") / "migrations"
"""Alembic's folder."""

_LOCK = 7_201_947  # an arbitrary number that must not change: concurrent starts wait for each other on it

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """The schema of a database.

    Attributes:
        revision: its revision; empty for a database without tables.
        newest: the revision that this program needs.
        is_known: whether this program knows the revision.
    """

    revision: str
    newest: str
    is_known: bool

    @property
    def is_current(self) -> bool:
        """Whether this program can work with it."""
        return self.revision == self.newest

    def __str__(self) -> str:
        if self.is_current:
            return f"schema {self.revision}, up to date"
        if not self.is_known:
            return f"schema {self.revision}, newer than this version of Watchstep, which needs {self.newest}"
        return f"schema {self.revision or 'none'}, {self.newest} is needed"


def upgrade(database: Database, revision: str = "head") -> None:
    """Create or upgrade the tables. Safe to run from several processes at once."""
    with _migrating(database) as connection:
        command.upgrade(_config(connection), revision)


def downgrade(database: Database, revision: str = "base") -> None:
    """Downgrade to an earlier revision; data of later revisions is lost."""
    with _migrating(database) as connection:
        command.downgrade(_config(connection), revision)


def status(database: Database) -> Status:
    """The schema of a database."""
    with database.engine.connect() as connection:
        revision = MigrationContext.configure(connection).get_current_revision() or ""
    script = _script()
    revisions = {known.revision for known in script.walk_revisions()}
    return Status(revision, script.get_current_head() or "", not revision or revision in revisions)


def checked_revision(revision: str) -> str:
    """Check that this program knows a revision; return it.

    Raises:
        ConfigError: it does not exist.
    """
    revisions = sorted(known.revision for known in _script().walk_revisions())
    if revision not in {"head", "base", *revisions}:
        raise ConfigError(
            f"revision {revision!r}: not found", f"use head, base, or one of {', '.join(revisions)}"
        )
    return revision


def prepare(database: Database, settings: Settings) -> None:
    """Ensure at the start of a process that the schema is the one that it needs.

    It is upgraded if ``WATCHSTEP_MIGRATE`` is ``at_start``. A newer schema is not changed, because it belongs to a
    later version, which may be running at the same time.

    Raises:
        ConfigError: the database does not answer in ``WATCHSTEP_DATABASE_START_SECONDS``, or its schema cannot be used.
    """
    database.wait(settings.database_start_seconds)
    current = status(database)
    if current.is_current:
        return
    if not current.is_known:
        raise ConfigError(
            f"database {database.shown_url}: {current}",
            "start that later version, or run its 'watchstep database downgrade' first",
        )
    if settings.migrate == "never":
        raise ConfigError(
            f"database {database.shown_url}: {current}",
            "run 'watchstep database upgrade', or set WATCHSTEP_MIGRATE=at_start",
        )
    try:
        upgrade(database)
    except SQLAlchemyError as error:
        raise ConfigError(
            f"database {database.shown_url}: cannot be upgraded to schema {current.newest} ({error})",
            "grant its user the right to create and alter tables, or upgrade it as a user with that right",
        ) from error
    _log.info("database %s: %s", database.shown_url, status(database))


@contextmanager
def _migrating(database: Database) -> Iterator[Connection]:
    """A transaction that excludes other migrations."""
    with database.engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            with connection.begin():
                lift(connection)  # large tables take long, and another process's migration may be waited for
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
                yield connection
            return
        # SQLite changes a table by recreating it, which must not delete the rows that refer to it. BEGIN IMMEDIATE is
        # the lock; the setting takes effect only outside of a transaction.
        driver = connection.connection.dbapi_connection
        assert driver is not None
        driver.execute("PRAGMA foreign_keys = OFF")
        try:
            with connection.begin():
                yield connection
                lost = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                if lost:
                    raise ConfigError(
                        f"database {database.shown_url}: rows refer to missing rows, first in table {lost[0][0]}",
                        "restore it from a backup, and report this; nothing was changed",
                    )
        finally:
            driver.execute("PRAGMA foreign_keys = ON")


def _script() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config(None))


def _config(connection: Connection | None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
