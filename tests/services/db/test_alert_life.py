"""The tables of alerts: what is deleted with a run, and what stays."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from watchstep_services.db.engine import Database


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
    from watchstep_services.db.models import RuleConfigRow
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
