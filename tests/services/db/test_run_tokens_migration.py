"""Tokens of single runs on the way back: the tables of before would take them for their project's, so they stay behind."""

from __future__ import annotations

import sqlalchemy as sa

from tests.services.driving import Driven, make_service
from watchstep.store.store import Store
from watchstep_services.auth import RunTokenRequest, create_for_run, create_token, id_of, identify
from watchstep_services.db.engine import Database
from watchstep_services.db.schema import downgrade, upgrade
from watchstep_services.runs.registration import Recorded, register

BEFORE = "0016"


def held(database: Database, table: str, column: str) -> set[str]:
    with database.engine.connect() as connection:
        return set(connection.execute(sa.text(f"SELECT {column} FROM {table}")).scalars())


def test_there_and_back(empty_database: Database, folder_store: Store) -> None:
    database = empty_database
    upgrade(database, BEFORE)
    with database.engine.begin() as connection:
        row = {"id": "0" * 16, "sha256": "0" * 64, "name": "", "role": "viewer", "created_ns": 7, "created_by": "", "revoked_by": ""}  # fmt: skip
        connection.execute(
            sa.text(
                f"INSERT INTO tokens ({', '.join(row)}) VALUES ({', '.join(f':{name}' for name in row)})"
            ),
            row,
        )
    upgrade(database)
    driven = Driven(make_service(database, folder_store))
    plain = create_token(database, "recorder", "vision")
    operator = create_token(database, "operator", "vision")
    register(driven.service, "vision", "r1", (), "operator", Recorded(registered_by=id_of(operator)))
    driven.register("r2")
    identity = identify(database, operator)
    assert identity is not None
    token = create_for_run(database, RunTokenRequest("vision", "r1"), identity)
    assert held(database, "runs", "registered_by") == {id_of(operator), ""}

    downgrade(database, BEFORE)
    assert held(database, "tokens", "id") == {"0" * 16, id_of(plain), id_of(operator)}
    assert held(database, "runs", "run") == {"r1", "r2"}

    upgrade(database)
    assert identify(database, token) is None
    seen = identify(database, plain)
    assert seen is not None
    assert (seen.role, seen.project, seen.run) == ("recorder", "vision", None)
    assert held(database, "runs", "registered_by") == {""}
