"""Tokens survive the upgrade and the way back, except those that the tables of before could not end."""

from __future__ import annotations

import hashlib

import sqlalchemy as sa

from watchstep_services.auth import create_token, id_of, identify, revoke
from watchstep_services.db.engine import Database
from watchstep_services.db.schema import downgrade, upgrade

BEFORE = "0005"
OLD = "ws_" + "a" * 43


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def rows(database: Database) -> dict[str, tuple[str, str | None, int]]:
    with database.engine.connect() as connection:
        tokens = connection.exec_driver_sql("SELECT sha256, role, project, created_ns FROM tokens").all()
        return {sha256: (role, project, created) for sha256, role, project, created in tokens}


def test_there_and_back(empty_database: Database) -> None:
    database = empty_database
    upgrade(database, BEFORE)
    with database.engine.begin() as connection:
        statement = sa.text("INSERT INTO tokens VALUES (:sha256, :role, :project, :created)")
        for token, role, project in ((OLD, "recorder", "vision"), (OLD + "b", "operator", None)):
            connection.execute(
                statement, {"sha256": digest(token), "role": role, "project": project, "created": 7}
            )
    upgrade(database)
    caller = identify(database, OLD)
    assert caller is not None
    assert (caller.role, caller.project, caller.token) == ("recorder", "vision", digest(OLD)[:16])
    token = create_token(database, "admin", name="new")
    ended = [create_token(database, "admin", lifetime_seconds=60), create_token(database, "admin")]
    revoke(database, id_of(ended[1]), None, "ann")

    downgrade(database, BEFORE)
    tokens = rows(database)
    assert tokens[digest(OLD)] == ("recorder", "vision", 7)
    assert tokens[digest(OLD + "b")] == ("operator", None, 7)
    assert set(tokens) == {digest(OLD), digest(OLD + "b"), digest(token)}

    upgrade(database)
    again = identify(database, OLD)
    assert again is not None
    assert again.role == "recorder"
