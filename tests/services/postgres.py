"""A real PostgreSQL, from a wheel, in a folder of its own."""

from __future__ import annotations

import atexit
import itertools
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import sqlalchemy as sa


@dataclass(frozen=True)
class Postgres:
    """A server; each test gets an empty database of it."""

    url: str
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @contextmanager
    def new_database(self, like: str | None = None) -> Iterator[str]:
        """URL of a database, which is dropped afterwards with all its connections.

        Args:
            like: the URL of another that nothing is connected to, for a copy of it; without, it is empty.
        """
        name = f"watchstep_{os.getpid()}_{next(self._numbers)}"
        root = sa.create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool)
        with root.connect() as connection:
            template = sa.make_url(like).database if like else "template1"
            connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {template}")
        try:
            yield sa.make_url(self.url).set(database=name).render_as_string(hide_password=False)
        finally:
            with root.connect() as connection:
                connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
            root.dispose()

    def forget_durability(self) -> None:
        """From now on, wait for no disk: what a crash of the machine would lose is nothing to tests."""
        root = sa.create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool)
        with root.connect() as connection:
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                connection.exec_driver_sql(f"ALTER SYSTEM SET {setting} = off")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
        root.dispose()


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Start a server, and stop it afterwards."""
    with warnings.catch_warnings():
        # pgserver asks for a runtime folder that containers do not have, and does without.
        warnings.simplefilter("ignore")
        from pgserver.postgres_server import get_server

        # A short path: the socket's address lies in it, and may have 107 characters.
        with tempfile.TemporaryDirectory(prefix="ws-pg-", ignore_cleanup_errors=True) as folder:
            os.chmod(folder, 0o755)  # noqa: PTH101 - as root, pgserver runs the server as another user
            server = get_server(folder, cleanup_mode="stop")
            try:
                yield Postgres(server.get_uri().replace("postgresql://", "postgresql+psycopg://"))
            finally:
                server.cleanup()
                # pgserver cleans up once more at exit, and logs to a stream that pytest has closed by then.
                atexit.unregister(server._cleanup)
