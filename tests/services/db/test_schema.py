from __future__ import annotations

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Base
from watchstep_services.db.schema import downgrade, upgrade


def tables(database: Database) -> set[str]:
    return set(sa.inspect(database.engine).get_table_names()) - {"alembic_version"}


def test_upgrade_and_downgrade(empty_database: Database) -> None:
    upgrade(empty_database)
    assert tables(empty_database) == set(Base.metadata.tables)
    upgrade(empty_database)
    downgrade(empty_database)
    assert tables(empty_database) == set()
    upgrade(empty_database)
    assert tables(empty_database) == set(Base.metadata.tables)


def test_migrations_lead_to_the_models(database: Database) -> None:
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_the_clock_does_not_go_back(database: Database) -> None:
    with database.read() as session:
        first, second = read_clock(session), read_clock(session)
    assert 1_700_000_000_000_000_000 < first <= second
