"""Bring a database to the newest schema, or back."""

from __future__ import annotations

from importlib import resources

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

from watchstep_services.database.engine import Database

_LOCK = 7_201_947  # any number, as long as it stays: concurrent starts wait for each other on it


def upgrade(database: Database, revision: str = "head") -> None:
    """Create or upgrade the tables. Safe to run from several processes at once."""
    with database.engine.begin() as connection:
        _lock(connection)
        command.upgrade(_config(connection), revision)


def downgrade(database: Database, revision: str = "base") -> None:
    """Go back to an earlier revision; what only later ones hold is lost."""
    with database.engine.begin() as connection:
        _lock(connection)
        command.downgrade(_config(connection), revision)


def _lock(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":  # on SQLite, BEGIN IMMEDIATE has locked it already
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})


def _config(connection: Connection) -> Config:
    config = Config()
    folder = resources.files("watchstep_services.database") / "migrations"
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
