"""The database keeps a list of who wrote what, so that a process that must write nothing can be held to it."""

from __future__ import annotations

from typing import Any

_TABLES = (
    "attempts", "ticks", "seals", "segments", "alerts", "findings", "rule_memories", "events", "actions", "action_tries",
)  # fmt: skip

_MAKE = """
CREATE SCHEMA harness;
CREATE TABLE harness.writes (who text, what text, at timestamptz);
CREATE FUNCTION harness.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO harness.writes VALUES (current_setting('application_name'), TG_TABLE_NAME, clock_timestamp());
    RETURN NULL;
END $$;
CREATE TRIGGER harness_runs AFTER UPDATE ON runs FOR EACH ROW
    WHEN (OLD.cursor IS DISTINCT FROM NEW.cursor OR OLD.ticks IS DISTINCT FROM NEW.ticks)
    EXECUTE FUNCTION harness.note();
"""


def install(engine: Any) -> None:
    """Make the list, and triggers that fill it."""
    with engine.begin() as connection:
        connection.exec_driver_sql(_MAKE)
        for table in _TABLES:
            connection.exec_driver_sql(
                f"CREATE TRIGGER harness_{table} AFTER INSERT OR UPDATE ON {table} FOR EACH ROW "
                "EXECUTE FUNCTION harness.note()"
            )


def written_by(engine: Any, pid: int, since: Any) -> list[str]:
    """Tables into which a process wrote since a moment of the database's clock."""
    with engine.connect() as connection:
        return list(
            connection.exec_driver_sql(
                "SELECT what FROM harness.writes WHERE who = %s AND at >= %s", (f"pid-{pid}", since)
            ).scalars()
        )


def clock(engine: Any) -> Any:
    """The database's time."""
    with engine.connect() as connection:
        return connection.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
