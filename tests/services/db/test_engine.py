from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from watchstep.errors import ConfigError
from watchstep_services.db.engine import Database, insert_missing, open_database
from watchstep_services.db.models import Project

ROW = {"name": "vision", "description": "images"}


def test_a_row_is_inserted_once(database: Database) -> None:
    with database.write() as session:
        assert insert_missing(session, Project, ROW)
        assert not insert_missing(session, Project, {**ROW, "description": "other"})
    with database.read() as session:
        assert session.execute(select(Project.description)).scalar_one() == "images"


REFUSALS = {
    "connection refused": True,
    'connection to server at "127.0.0.1", port 5432 failed: FATAL:  the database system is starting up': True,
    "FATAL:  the database system is not yet accepting connections\nDETAIL:  Consistent recovery state has not been yet reached.": True,
    "FATAL:  sorry, too many clients already": True,
    'FATAL:  password authentication failed for user "watchstep"': False,
    'FATAL:  database "watchstep" does not exist': False,
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_database_that_starts_is_waited_for(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    database = open_database(f"sqlite:///{tmp_path}/database")
    answers = [ConfigError(f"database d: does not answer ({reason})", "check it")] * 3
    pauses: list[float] = []

    def check(_database: Database) -> None:
        if answers:
            raise answers.pop()

    monkeypatch.setattr(Database, "check", check)
    monkeypatch.setattr("watchstep_services.db.engine.time.sleep", pauses.append)
    if not REFUSALS[reason]:
        with pytest.raises(ConfigError, match="does not answer"):
            database.wait(60)
        assert (len(answers), pauses) == (2, [])
        return
    database.wait(60)
    assert pauses == [0.25, 0.5, 1.0]
    assert [record.message for record in caplog.records] == [
        f"database d: does not answer ({reason}); trying again for 60 s"
    ]
    answers = [ConfigError(f"database d: does not answer ({reason})", "check it")]
    with pytest.raises(ConfigError, match="does not answer"):
        database.wait(0)


def test_a_transaction_that_raises_leaves_nothing(database: Database) -> None:
    def write_twice() -> None:
        with database.write() as session:
            insert_missing(session, Project, ROW)
            session.add(Project(**ROW))

    with pytest.raises(IntegrityError):
        write_twice()
    with database.read() as session:
        assert session.execute(select(Project)).first() is None


def test_reading_goes_on_while_another_writes(database: Database) -> None:
    with database.write() as writing:
        insert_missing(writing, Project, ROW)
        with database.read() as session:
            assert session.execute(select(Project)).first() is None


@pytest.mark.parametrize("url", ["mysql://host/name", "nonsense", "sqlite:////proc/none/x.sqlite"])
def test_a_url_that_cannot_be_used_says_so(url: str) -> None:
    with pytest.raises(ConfigError):
        open_database(url)


def test_a_password_is_not_told() -> None:
    database = open_database("postgresql://user:secret@127.0.0.1:1/none")
    with pytest.raises(ConfigError, match="does not answer") as caught:
        database.check()
    assert "secret" not in str(caught.value)
    database.close()


def test_a_further_connection_keeps_the_locks_of_those_that_are_open(tmp_path: Path) -> None:
    file = tmp_path / "watchstep.sqlite"
    opened = open_database(f"sqlite:///{file}")
    log = file.with_name(file.name + "-wal")
    with opened.engine.connect() as first:
        first.execute(text("CREATE TABLE facts (value INTEGER)"))
        first.commit()
        with opened.engine.connect() as second:
            second.execute(text("SELECT * FROM facts"))
        before = log.stat().st_ino
        # The last process that closes a database removes its write-ahead log, if it sees no locks of others.
        program = (
            "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]);"
            " c.execute('INSERT INTO facts VALUES (1)'); c.commit(); c.close()"
        )
        subprocess.run([sys.executable, "-c", program, file], check=True, timeout=60)
        assert log.exists()
        assert log.stat().st_ino == before
        assert first.execute(text("SELECT value FROM facts")).scalar_one() == 1
    opened.close()
