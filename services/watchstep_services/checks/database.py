"""The database: whether it answers, its schema, what its user may do, and its clock."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from watchstep.errors import WatchstepError
from watchstep_services.checks.finding import CheckFinding, failed
from watchstep_services.core.settings import NANOSECONDS, Settings
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Base
from watchstep_services.db.schema import status

MOST_SKEW_SECONDS = 5.0
"""Between this process's clock and the database's. Leases follow the database's alone; times in logs do not."""


def check_database(database: Database, settings: Settings) -> Iterator[CheckFinding]:
    """Try the database."""
    try:
        database.check()
    except WatchstepError as error:
        yield failed("database", error)
        return
    yield CheckFinding("database", "ok", database.shown_url)
    yield _schema(database, settings)
    yield _rights(database, settings)
    yield _clock(database)


def _schema(database: Database, settings: Settings) -> CheckFinding:
    found = status(database)
    if found.is_current:
        return CheckFinding("database schema", "ok", str(found))
    if found.is_known and settings.migrate == "at_start":
        return CheckFinding(
            "database schema", "warning", str(found), "the next process that starts brings it up to date"
        )
    hint = "run 'watchstep database upgrade'" if found.is_known else "start the later version of Watchstep"
    return CheckFinding("database schema", "failed", str(found), hint)


def _rights(database: Database, settings: Settings) -> CheckFinding:
    """What the service does with its tables, tried on all of them and rolled back."""
    held = status(database).held
    refused = []
    try:
        with database.engine.connect() as connection:
            for table in Base.metadata.sorted_tables if held else ():
                for verb in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                    if not _may(connection.dialect.name, connection, verb, table.name):
                        refused.append(f"{verb} {table.name}")  # noqa: PERF401 - reads better so
            if settings.migrate == "at_start":
                connection.execute(text(f"CREATE TABLE watchstep_probe_{uuid.uuid4().hex} (id INTEGER)"))
            connection.rollback()
    except SQLAlchemyError as error:
        wanted = "grant CREATE on its schema, or set WATCHSTEP_MIGRATE=never and upgrade as another user"
        return failed("database rights", error, wanted)
    if refused:
        shown = ", ".join(refused[:5]) + (f" and {len(refused) - 5} more" if len(refused) > 5 else "")
        return CheckFinding(
            "database rights", "failed", f"not allowed: {shown}", "grant them to the URL's user"
        )
    return CheckFinding(
        "database rights", "ok", "reads, writes" + (", makes tables" * (settings.migrate == "at_start"))
    )


def _may(dialect: str, connection: object, verb: str, table: str) -> bool:
    if dialect != "postgresql":  # SQLite knows no users; that the file can be written to, the new table tells
        return True
    asked = text("SELECT to_regclass(:name) IS NULL OR has_table_privilege(:name, :verb)")
    return bool(connection.execute(asked, {"name": table, "verb": verb}).scalar_one())  # type: ignore[attr-defined]


def _clock(database: Database) -> CheckFinding:
    before = time.time_ns()
    with database.read() as session:
        theirs = read_clock(session)
    after = time.time_ns()
    # The answer belongs to some moment between; only what lies beyond both is skew.
    skew = max(before - theirs, theirs - after, 0) / NANOSECONDS
    said = f"{skew:.1f} s apart from the database's"
    if skew > MOST_SKEW_SECONDS:
        return CheckFinding(
            "clock", "warning", said, "run NTP on both machines: times in logs will not agree"
        )
    return CheckFinding("clock", "ok", said)
