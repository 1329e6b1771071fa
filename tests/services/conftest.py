"""Databases of both kinds, and a service that nothing drives but the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.driving import Driven, make_service
from tests.services.postgres import Postgres, running_postgres
from watchstep.store import Store
from watchstep_services.database.engine import Database, open_database
from watchstep_services.database.schema import upgrade


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Each kind of database in turn, without tables."""
    if request.param == "sqlite":
        database = open_database(f"sqlite:///{tmp_path / 'service.sqlite'}")
        yield database
        database.close()
        return
    server: Postgres = request.getfixturevalue("postgres")
    with server.new_database() as url:
        database = open_database(url)
        yield database
        database.close()


@pytest.fixture
def database(empty_database: Database) -> Database:
    """Each kind of database in turn, with tables."""
    upgrade(empty_database)
    return empty_database


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Database]:
    """SQLite with tables, for what does not depend on the database."""
    database = open_database(f"sqlite:///{tmp_path / 'service.sqlite'}")
    upgrade(database)
    yield database
    database.close()


@pytest.fixture
def driven(database: Database, folder_store: Store) -> Driven:
    """A service on each kind of database, driven by the test."""
    return Driven(make_service(database, folder_store))


@pytest.fixture
def driven_sqlite(sqlite: Database, folder_store: Store) -> Driven:
    """A service on SQLite, driven by the test."""
    return Driven(make_service(sqlite, folder_store))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    names: Any = [name for name in os.environ if name.startswith("WATCHSTEP_")]
    for name in names:
        monkeypatch.delenv(name)


@pytest.fixture
def sqlite_factory(tmp_path: Path) -> Iterator[Any]:
    """Makes SQLite databases with tables, by number."""
    made: list[Database] = []

    def make(number: int) -> Database:
        database = open_database(f"sqlite:///{tmp_path / f'service-{number}.sqlite'}")
        upgrade(database)
        made.append(database)
        return database

    yield make
    for database in made:
        database.close()
