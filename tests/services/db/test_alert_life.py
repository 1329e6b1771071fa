"""The tables of alerts come and go with data in the others and in them."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from watchstep_services.db.engine import Database
from watchstep_services.db.schema import downgrade, upgrade

BEFORE, HERE = "0007", "0008"


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


def test_up_and_down_with_data(empty_database: Database) -> None:
    database = empty_database
    upgrade(database, BEFORE)
    data = json.dumps({"labels": {"team": "vision"}})
    write(database, columns(database, "projects", {"name": "vision"}))
    write(database, columns(database, "runs", {"id": 1, "project": "vision", "run": "night"}))
    config = {
        "id": 1,
        "run_id": 1,
        "origin": "owner",
        "name": "nan_or_inf",
        "rule": "nan_or_inf",
        "data": data,
    }
    write(database, columns(database, "rule_configs", config))
    write(database, columns(database, "alerts", {"id": 1, "run_id": 1, "config_id": 1, "attempt": "a1"}))
    write(database, columns(database, "rule_memories", {"config_id": 1, "attempt": "a1"}))

    upgrade(database, HERE)
    ((fingerprint,),) = rows(database, "SELECT fingerprint FROM alerts")
    assert fingerprint == "4d25259fa882ebf697b9f39b24a0e8df"
    standing = {"id": 1, "run_id": 1, "fingerprint": fingerprint}
    write(database, columns(database, "alert_standings", standing))
    write(database, columns(database, "silences", {"id": 1, "project": "vision"}))
    write(database, columns(database, "alert_groups", {"id": 1, "project": "vision", "run_id": 1}))
    write(database, columns(database, "alert_group_members", {"group_id": 1, "standing_id": 1}))
    write(database, columns(database, "muted_notifications", {"id": 1, "standing_id": 1}))
    write(database, columns(database, "stop_grants", {"id": 1, "project": "vision"}))
    write(database, columns(database, "stop_audit", {"id": 1, "project": "vision", "run": "night"}))

    downgrade(database, BEFORE)
    assert rows(database, "SELECT id, config_id, attempt FROM alerts") == [(1, 1, "a1")]
    upgrade(database, HERE)
    assert rows(database, "SELECT fingerprint FROM alerts") == [(fingerprint,)]


def test_an_alerts_fingerprint_is_the_one_that_the_migration_made() -> None:
    from watchstep_services.db.models import RuleConfigRow
    from watchstep_services.evaluation.alert_instances import fingerprint

    row = RuleConfigRow(name="nan_or_inf", origin="owner", data={"labels": {"team": "vision"}})
    assert fingerprint("vision", "night", row) == "4d25259fa882ebf697b9f39b24a0e8df"


def test_what_is_known_of_a_run_goes_with_it_and_the_log_stays(database: Database) -> None:
    write(database, columns(database, "projects", {"name": "vision"}))
    write(database, columns(database, "runs", {"id": 1, "project": "vision", "run": "night"}))
    write(database, columns(database, "alert_instances", {"id": 1, "run_id": 1, "fingerprint": "f"}))
    write(database, columns(database, "alert_groups", {"id": 1, "project": "vision", "run_id": 1}))
    write(database, columns(database, "alert_group_members", {"group_id": 1, "instance_id": 1}))
    write(database, columns(database, "muted_notifications", {"id": 1, "instance_id": 1}))
    write(database, columns(database, "stop_audit", {"id": 1, "project": "vision", "run": "night"}))
    write(database, "DELETE FROM runs")
    for table in ("alert_instances", "alert_groups", "alert_group_members", "muted_notifications"):
        assert rows(database, f"SELECT * FROM {table}") == []
    assert len(rows(database, "SELECT * FROM stop_audit")) == 1
