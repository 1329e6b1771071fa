"""The database keeps a list of who wrote what, so that a process that must write nothing can be held to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TABLES = (
    "attempts", "ticks", "watermarks", "segments", "alerts", "alert_instances", "findings", "rule_states", "events", "actions",
    "action_tries",
)  # fmt: skip

_MAKE = """
CREATE SCHEMA harness;
CREATE TABLE harness.writes (who text, what text, op text, run_id bigint, action_id bigint, at timestamptz);
CREATE FUNCTION harness.note() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    held jsonb := to_jsonb(NEW);
    run bigint := (held->>'run_id')::bigint;
    action bigint := (held->>'action_id')::bigint;
BEGIN
    IF TG_TABLE_NAME = 'runs' THEN run := (held->>'id')::bigint; END IF;
    IF TG_TABLE_NAME = 'actions' THEN action := (held->>'id')::bigint; END IF;
    IF run IS NULL AND held ? 'config_id' THEN
        SELECT rule_configs.run_id INTO run FROM rule_configs WHERE id = (held->>'config_id')::bigint;
    END IF;
    INSERT INTO harness.writes
    VALUES (
        current_setting('application_name'), concat_ws(' ', TG_TABLE_NAME, held->>'type'), TG_OP, run, action, clock_timestamp()
    );
    RETURN NULL;
END $$;
CREATE TRIGGER harness_runs AFTER UPDATE ON runs FOR EACH ROW
    WHEN (OLD.cursor IS DISTINCT FROM NEW.cursor OR OLD.ticks IS DISTINCT FROM NEW.ticks)
    EXECUTE FUNCTION harness.note();
"""

_WRITTEN = "SELECT op || ' ' || what FROM harness.writes WHERE who = %s AND at >= %s AND "
# Beside its evaluation a process has threads that tell receivers, each action under a lease of its own.
_BY_EVALUATION = _WRITTEN + "run_id = %s AND (action_id IS NULL OR op = 'INSERT')"
_BY_DISPATCH = _WRITTEN + "action_id = %s"


def install(engine: Any) -> None:
    """Make the list, and triggers that fill it."""
    with engine.begin() as connection:
        connection.exec_driver_sql(_MAKE)
        for table in _TABLES:
            connection.exec_driver_sql(
                f"CREATE TRIGGER harness_{table} AFTER INSERT OR UPDATE ON {table} FOR EACH ROW "
                "EXECUTE FUNCTION harness.note()"
            )


def written_by(engine: Any, taken: Mapping[str, Any], since: Any) -> list[str]:
    """What a process wrote since a moment of the database's clock of the run, or the action, that was not its own any more.

    Args:
        engine: of the database.
        taken: the note that the process left when it was paused: its ``pid``, and ``run_id`` or ``action_id``.
        since: the moment.
    """
    of_run = "run_id" in taken
    statement = _BY_EVALUATION if of_run else _BY_DISPATCH
    subject = taken["run_id" if of_run else "action_id"]
    with engine.connect() as connection:
        return list(connection.exec_driver_sql(statement, (f"pid-{taken['pid']}", since, subject)).scalars())


def clock(engine: Any) -> Any:
    """The database's time."""
    with engine.connect() as connection:
        return connection.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
