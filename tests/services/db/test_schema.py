"""The schema, its migrations, and the tables of alerts: what is deleted with a run."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from watchstep.errors import ConfigError
from watchstep_services.core.settings import load_settings
from watchstep_services.db import schema
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Base, RuleConfigRow
from watchstep_services.db.schema import downgrade, upgrade

SECOND = """
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade():
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("color", sa.String(16), nullable=False, server_default="blue"))
        runs.alter_column("last_step", new_column_name="newest_step")
    op.execute("UPDATE runs SET color = 'red' WHERE newest_step > 0")
    op.create_table("colors", sa.Column("run_id", sa.BigInteger, sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True))


def downgrade():
    op.drop_table("colors")
    with op.batch_alter_table("runs") as runs:
        runs.drop_column("color")
        runs.alter_column("newest_step", new_column_name="last_step")
"""


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


@pytest.fixture
def second_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The product's migrations and one after them."""
    folder = tmp_path / "migrations"
    shutil.copytree(Path(str(schema.MIGRATIONS)), folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / "second_schema.py").write_text(SECOND)
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", folder)
        yield


def reflected(connection: sa.Connection) -> list[sa.Table]:
    """The tables as they are, those that others refer to first."""
    metadata = sa.MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.sorted_tables if table.name != "alembic_version"]


def counts(database: Database) -> dict[str, int]:
    with database.engine.connect() as connection:
        return {
            table.name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in reflected(connection)
        }


def fill(database: Database) -> None:
    """A row into each table."""
    numbers = itertools.count(1)
    with database.engine.begin() as connection:
        for table in reflected(connection):
            row = {column.name: value_of(connection, column, next(numbers)) for column in table.columns}
            connection.execute(table.insert().values(row))


def value_of(connection: sa.Connection, column: sa.Column[Any], number: int) -> Any:
    for key in column.foreign_keys:
        value = connection.execute(sa.select(key.column).limit(1)).scalar_one_or_none()
        assert value is not None or column.nullable, f"{column}: nothing in {key.column.table}"
        return value
    kind: Any = column.type
    if isinstance(kind, sa.Boolean):
        return False
    if isinstance(kind, sa.JSON):
        return {}
    if isinstance(kind, sa.Integer):
        return number
    if isinstance(kind, sa.Float | sa.Numeric):
        return 1.5
    return b"x" if isinstance(kind, sa.LargeBinary) else f"x{number}"


def colors(database: Database) -> list[str]:
    with database.engine.connect() as connection:
        return list(connection.execute(sa.text("SELECT color FROM runs")).scalars())


@pytest.mark.ci
def test_rows_outlive_a_migration_and_the_way_back(empty_database: Database, second_schema: None) -> None:
    schema.upgrade(empty_database, "0001")
    fill(empty_database)
    full = counts(empty_database)
    assert all(full.values()), full

    schema.upgrade(empty_database)
    assert counts(empty_database) == full | {"colors": 0}
    assert colors(empty_database) == ["red"]

    schema.downgrade(empty_database, "0001")
    assert counts(empty_database) == full
    schema.upgrade(empty_database)
    schema.downgrade(empty_database)
    assert counts(empty_database) == {}


def test_a_migration_that_loses_rows_which_others_refer_to_changes_nothing(
    sqlite: Database, second_schema: None
) -> None:
    fill(sqlite)
    bad = Path(str(schema.MIGRATIONS)) / "versions" / "second_schema.py"
    bad.write_text(SECOND.replace("SET color = 'red'", "SET project = 'nothing'"))
    with pytest.raises(ConfigError, match=r"rows refer to missing rows, first in table runs"):
        schema.upgrade(sqlite)
    assert schema.status(sqlite).revision == "0001"
    schema.downgrade(sqlite, "0001")
    assert "color" not in {column["name"] for column in sa.inspect(sqlite.engine).get_columns("runs")}


def test_a_process_upgrades_the_schema_or_refuses_to_start(
    sqlite: Database, request: pytest.FixtureRequest
) -> None:
    first = load_settings(migrate="never")
    schema.prepare(sqlite, first)
    request.getfixturevalue("second_schema")
    with pytest.raises(ConfigError, match=r"schema 0001, 0002 is needed\n.*watchstep database upgrade"):
        schema.prepare(sqlite, first)
    schema.prepare(sqlite, load_settings())
    assert str(schema.status(sqlite)) == "schema 0002, up to date"


def rows(database: Database, query: str) -> list[Any]:
    with database.engine.connect() as connection:
        return list(connection.execute(sa.text(query)).all())


def write(database: Database, *statements: str) -> None:
    with database.engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement.replace(":", r"\:")))


def columns(database: Database, table: str, values: dict[str, Any]) -> str:
    """An INSERT of a row, with something in every column that must have it."""
    held = dict(values)
    for column in sa.inspect(database.engine).get_columns(table):
        if column["name"] in held or column["nullable"] or column["default"] is not None:
            continue
        kind = str(column["type"]).upper()
        held[column["name"]] = "{}" if "JSON" in kind else "" if "CHAR" in kind or kind == "TEXT" else 0
        if kind == "BOOLEAN":
            held[column["name"]] = False
    shown = ", ".join(
        str(value) if isinstance(value, bool | int) else "'" + str(value).replace("'", "''") + "'"
        for value in held.values()
    )
    return f"INSERT INTO {table} ({', '.join(held)}) VALUES ({shown})"


def test_the_fingerprint_of_an_alert_does_not_change() -> None:
    from watchstep_services.evaluation.alert_instances import fingerprint

    row = RuleConfigRow(name="nan_or_inf", origin="owner", data={"labels": {"team": "vision"}})
    assert fingerprint("vision", "night", row) == "4d25259fa882ebf697b9f39b24a0e8df"


def test_what_is_known_of_a_run_goes_with_it_and_the_log_stays(database: Database) -> None:
    write(database, columns(database, "projects", {"name": "vision"}))
    write(database, columns(database, "stores", {"id": 1}))
    write(database, columns(database, "project_stores", {"id": 1, "project": "vision", "store_id": 1}))
    run = {"id": 1, "project": "vision", "run": "night", "project_store_id": 1}
    write(database, columns(database, "runs", run))
    write(database, columns(database, "alert_instances", {"id": 1, "run_id": 1, "fingerprint": "f"}))
    write(database, columns(database, "alert_groups", {"id": 1, "project": "vision", "run_id": 1}))
    write(database, columns(database, "alert_group_members", {"group_id": 1, "instance_id": 1}))
    write(database, columns(database, "muted_notifications", {"id": 1, "instance_id": 1}))
    write(database, columns(database, "stop_audit", {"id": 1, "project": "vision", "run": "night"}))
    write(database, "DELETE FROM runs")
    for table in ("alert_instances", "alert_groups", "alert_group_members", "muted_notifications"):
        assert rows(database, f"SELECT * FROM {table}") == []
    assert len(rows(database, "SELECT * FROM stop_audit")) == 1
