"""A database whose clock stands still until the test moves it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import event

from watchstep_services.db.clock import replace_clock
from watchstep_services.db.engine import Database, open_database
from watchstep_services.db.schema import upgrade

SECOND = 10**9
START_NS = 1_800_000_000 * SECOND


@dataclass
class Clock:
    """What the database takes for the time."""

    now_ns: int = START_NS

    def move(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND)


def made_once(place: Path) -> Path:
    """A SQLite file with all tables, to be copied: making one takes longer than many a test."""
    database = open_database(f"sqlite:///{place}")
    upgrade(database)
    database.close()
    return place


def open_with(clock: Clock, template: Path, place: Path) -> Database:
    """A database like the template, by the test's clock."""
    shutil.copyfile(template, place)
    database = open_database(f"sqlite:///{place}")

    def give_clock(connection: Any, _record: Any) -> None:
        connection.create_function("test_clock", 0, lambda: clock.now_ns)

    event.listen(database.engine, "connect", give_clock)
    replace_clock(database.engine, "test_clock()")
    return database
