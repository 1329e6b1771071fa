"""Every migration, forth and back, with rows in every table that there is at the time."""

from __future__ import annotations

import itertools
from typing import Any

import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory

from watchstep_services.db import migrations
from watchstep_services.db.engine import Database
from watchstep_services.db.schema import downgrade, upgrade

VERSIONS = "alembic_version"
BEFORE_STANDARD_TERMS, STANDARD_TERMS = "0024", "0025"
TITLE = 'a title that quotes "type": "watchstep.alert.firing"'
# What a migration reads of a row has to be what the service would have written there.
WRITTEN: dict[str, Any] = {
    "store_url": "/data/runs",
    "url": "/data/runs",
    "sha256": "0" * 64,
    "kind": "local",
}
# A table that was renamed keeps its rows under the other name.
RENAMED = {
    "seals": "watermarks",
    "alert_standings": "alert_instances",
    "rule_memories": "rule_states",
    "job_holders": "job_owners",
}


def revisions() -> list[str]:
    """All, the oldest first."""
    config = Config()
    config.set_main_option("script_location", next(iter(migrations.__path__)))
    return [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()][::-1]


def reflected(connection: sa.Connection) -> list[sa.Table]:
    """The tables as they are, those that others refer to first."""
    metadata = sa.MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.sorted_tables if table.name != VERSIONS]


def counts(database: Database) -> dict[str, int]:
    with database.engine.connect() as connection:
        return {
            RENAMED.get(table.name, table.name): connection.execute(
                sa.select(sa.func.count()).select_from(table)
            ).scalar_one()
            for table in reflected(connection)
        }


def fill(database: Database) -> None:
    """A row into each table that has none."""
    numbers = itertools.count(1)
    with database.engine.begin() as connection:
        for table in reflected(connection):
            if not connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one():
                values = {
                    column.name: value_of(connection, column, next(numbers)) for column in table.columns
                }
                connection.execute(table.insert().values(values))


def value_of(connection: sa.Connection, column: sa.Column[Any], number: int) -> Any:
    for key in column.foreign_keys:
        parent = key.column
        value = connection.execute(sa.select(parent).limit(1)).scalar_one_or_none()
        assert value is not None or column.nullable, f"{column}: nothing in {parent.table}"
        return value
    if column.name in WRITTEN and not isinstance(column.type, sa.Integer | sa.JSON):
        return WRITTEN[column.name]
    return plain_value(column.type, number)


def plain_value(kind: Any, number: int) -> Any:
    if isinstance(kind, sa.Boolean):
        return False
    if isinstance(kind, sa.JSON):
        return {}
    if isinstance(kind, sa.Integer):
        return number
    if isinstance(kind, sa.Float | sa.Numeric):
        return 1.5
    if isinstance(kind, sa.LargeBinary):
        return b"x"
    return f"x{number}"


def test_rows_outlive_every_migration_and_the_way_back(empty_database: Database) -> None:
    order = revisions()
    assert len(order) > 10
    for revision in order:
        before = {}
        if revision != order[0]:
            before = counts(empty_database)
        upgrade(empty_database, revision)
        after = counts(empty_database)
        assert {name: after.get(name) for name in before if name in after} == {
            name: count for name, count in before.items() if name in after
        }, revision
        fill(empty_database)
    full = counts(empty_database)
    assert all(full.values()), full
    before = full
    for revision in reversed(order[:-1]):
        downgrade(empty_database, revision)
        after = counts(empty_database)
        assert after == {name: before[name] for name in after}, revision
        before = after
    upgrade(empty_database)
    assert set(counts(empty_database)) == set(full)
    downgrade(empty_database)
    assert counts(empty_database) == {}


def event_types(database: Database) -> list[str]:
    """The type of the only event: of its row, of its JSON, and of the webhook that is due."""
    events = sa.table("events", sa.column("type", sa.String), sa.column("event", sa.JSON))
    actions = sa.table("actions", sa.column("payload", sa.JSON))
    with database.engine.connect() as connection:
        kind, event = connection.execute(sa.select(events.c.type, events.c.event)).one()
        payload = connection.execute(sa.select(actions.c.payload)).scalar_one()
    assert event["data"]["title"] == payload["event"]["data"]["title"] == TITLE
    return [kind, event["type"], payload["event"]["type"]]


def test_stored_events_get_the_types_of_their_schema(empty_database: Database) -> None:
    upgrade(empty_database, BEFORE_STANDARD_TERMS)
    fill(empty_database)
    kind = "watchstep.alert.firing"
    event = {"specversion": "1.0", "type": kind, "data": {"title": TITLE}}
    with empty_database.engine.begin() as connection:
        tables = {table.name: table for table in reflected(connection)}
        connection.execute(tables["events"].update().values(type=kind, event=event))
        connection.execute(tables["actions"].update().values(payload={"url": "https://x", "event": event}))
    upgrade(empty_database, STANDARD_TERMS)
    assert event_types(empty_database) == [f"io.{kind}"] * 3
    downgrade(empty_database, BEFORE_STANDARD_TERMS)
    assert event_types(empty_database) == [kind] * 3
