"""Databases of both kinds, and a service that nothing drives but the test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.driving import Driven, make_service
from tests.services.postgres import Postgres, running_postgres
from watchstep.store.store import Store
from watchstep_services.db.engine import Database, open_database
from watchstep_services.db.schema import upgrade

# Tests on PostgreSQL, which takes the longest to start and to copy, are of the second tier.
DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.ci)]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        server.forget_durability()
        yield server


@pytest.fixture(scope="session")
def sqlite_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite database with tables, to be copied: bringing an empty one to the newest schema takes long."""
    path = tmp_path_factory.mktemp("tables") / "service.sqlite"
    _make_tables(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres_tables(postgres: Postgres) -> Iterator[str]:
    """URL of a PostgreSQL database with tables, to be copied."""
    with postgres.new_database() as url:
        _make_tables(url)
        yield url


def _make_tables(url: str) -> None:
    database = open_database(url)
    upgrade(database)
    database.close()


@pytest.fixture(params=DATABASES)
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


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    """Each kind of database in turn, with tables."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite")
        return
    server: Postgres = request.getfixturevalue("postgres")
    with server.new_database(request.getfixturevalue("postgres_tables")) as url:
        database = open_database(url)
        yield database
        database.close()


@pytest.fixture
def sqlite(sqlite_factory: Callable[[int], Database]) -> Database:
    """SQLite with tables, for what does not depend on the database."""
    return sqlite_factory(0)


@pytest.fixture
def driven(database: Database, folder_store: Store) -> Driven:
    """A service on each kind of database, driven by the test."""
    return Driven(make_service(database, folder_store))


@pytest.fixture
def driven_sqlite(sqlite: Database, folder_store: Store) -> Driven:
    """A service on SQLite, driven by the test."""
    return Driven(make_service(sqlite, folder_store))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import os

    names: Any = [name for name in os.environ if name.startswith("WATCHSTEP_")]
    for name in names:
        monkeypatch.delenv(name)
    # One folder for all tests: a service that outlives a test reads the job records of the next one.
    monkeypatch.setenv("WATCHSTEP_JOBS", str(tmp_path_factory.getbasetemp() / "jobs"))


@pytest.fixture
def sqlite_factory(tmp_path: Path, sqlite_tables: Path) -> Iterator[Callable[[int], Database]]:
    """Makes SQLite databases with tables, by number."""
    made: list[Database] = []

    def make(number: int) -> Database:
        path = tmp_path / ("service.sqlite" if number == 0 else f"service-{number}.sqlite")
        shutil.copyfile(sqlite_tables, path)
        made.append(open_database(f"sqlite:///{path}"))
        return made[-1]

    yield make
    for database in made:
        database.close()
