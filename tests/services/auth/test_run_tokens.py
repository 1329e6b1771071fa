"""Making a token of a run while its maker is revoked, on PostgreSQL, where both may be under way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.services.driving import Driven, make_service
from tests.services.jobs import eventually
from tests.services.postgres import Postgres
from watchstep.store.store import Store
from watchstep_services.auth import (
    AuthenticatedCaller,
    RunTokenRequest,
    TooMuchError,
    add_token,
    create_for_run,
    create_token,
    id_of,
    identify,
    revoke,
)
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database, open_database
from watchstep_services.db.models import RunRow, Token
from watchstep_services.db.schema import upgrade
from watchstep_services.runs.registration import RunOrigin, register

ASKED = RunTokenRequest("vision", "mine")
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


@pytest.fixture
def database(postgres: Postgres) -> Iterator[Database]:
    with postgres.new_database() as url:
        database = open_database(url)
        upgrade(database)
        yield database
        database.close()


@pytest.fixture
def maker(database: Database, tmp_path: Path) -> AuthenticatedCaller:
    """An operator that has registered the run."""
    (tmp_path / "store").mkdir()
    driven = Driven(make_service(database, Store.open(tmp_path / "store")))
    token = create_token(database, "operator", "vision")
    register(driven.service, "vision", "mine", (), "operator", RunOrigin(registered_by=id_of(token)))
    caller = identify(database, token)
    assert caller is not None
    return caller


def until_it_waits(database: Database, done: Future[Any]) -> None:
    def waits() -> bool:
        with database.engine.connect() as connection:
            return bool(connection.execute(sa.text(WAITING)).scalar_one())

    eventually(lambda: waits() or done.done(), 60)
    assert not done.done()


def test_none_is_made_once_the_maker_is_revoked(database: Database, maker: AuthenticatedCaller) -> None:
    with ThreadPoolExecutor(1) as threads:
        with database.write() as session:
            row = session.execute(select_for_update(maker)).scalar_one()
            row.revoked_ns = read_clock(session)
            session.flush()
            making = threads.submit(create_for_run, database, ASKED, maker)
            until_it_waits(database, making)
        with pytest.raises(TooMuchError, match="no longer valid"):
            making.result(60)


def test_one_that_was_being_made_is_revoked_with_its_maker(
    database: Database, maker: AuthenticatedCaller
) -> None:
    with ThreadPoolExecutor(1) as threads:
        with database.write() as session:
            session.execute(select_for_update(maker, read=True)).scalar_one()
            run_id = session.execute(sa.select(RunRow.id)).scalar_one()
            made = Token(role="recorder", project="vision", run_id=run_id, maker=maker.token, created_by="")
            token = add_token(session, made, 3600)
            session.flush()
            revoking = threads.submit(revoke, database, maker.token, None, "ann")
            until_it_waits(database, revoking)
        assert revoking.result(60).run_tokens == (id_of(token),)
    assert identify(database, token) is None


def select_for_update(maker: AuthenticatedCaller, *, read: bool = False) -> sa.Select[Any]:
    return sa.select(Token).where(Token.id == maker.token).with_for_update(read=read)
