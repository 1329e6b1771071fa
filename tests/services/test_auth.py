"""Tokens in the database: what they permit, for how long, and how they are created while their creator is revoked."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, update

from tests.laws import examples
from tests.services.driving import Driven, make_service, statements
from tests.services.jobs import eventually
from tests.services.postgres import Postgres
from watchstep.errors import BadNameError, ConfigError, NotFoundError
from watchstep.store.store import Store
from watchstep_services.auth import (
    PERMISSIONS,
    ROLES,
    AuthenticatedCaller,
    RunTokenRequest,
    TokenRequest,
    TooMuchError,
    add_token,
    create_for,
    create_for_run,
    create_token,
    find_token,
    id_of,
    identify,
    revoke,
)
from watchstep_services.core.settings import nanoseconds
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database, open_database
from watchstep_services.db.models import RunRow, Token
from watchstep_services.db.schema import upgrade
from watchstep_services.runs.registration import RunOrigin, register

MINUTE = nanoseconds(60.0)
ASKED = RunTokenRequest("vision", "mine")
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


def row_of(database: Database, token: str) -> Token:
    return find_token(database, id_of(token), None)


def shift(database: Database, token: str, **columns: int) -> None:
    """As if time had passed: the token's times lie so much earlier, in nanoseconds."""
    with database.write() as session:
        values = {name: getattr(Token, name) - by for name, by in columns.items()}
        session.execute(update(Token).where(Token.id == id_of(token)).values(values))


def test_a_token_is_found_by_its_id_and_opens_by_its_secret(database: Database) -> None:
    token = create_token(database, "recorder", "vision", name="cluster a", created_by="somebody")
    assert re.fullmatch(r"wst_[0-9a-f]{16}_[A-Za-z0-9_-]{43}", token)
    assert identify(database, token) == AuthenticatedCaller("recorder", "vision", id_of(token), "cluster a")
    row = row_of(database, token)
    assert (row.id, row.created_by, row.expires_ns, row.revoked_ns) == (
        token.split("_")[1],
        "somebody",
        None,
        None,
    )
    stored = " ".join(str(getattr(row, column.key)) for column in Token.__table__.columns)
    assert token.split("_", 2)[2] not in stored
    other = f"{token[:-1]}{'A' if token[-1] != 'A' else 'B'}"
    assert id_of(other) == id_of(token)
    for wrong in (
        other,
        token[:-1],
        f"{token}A",
        token.upper(),
        token.split("_")[1],
        "",
        "wst__",
        "\x00",
        "\udcff",
        "x" * 10**6,
    ):
        assert identify(database, wrong) is None, wrong[:100]


def test_one_from_before_there_were_ids_opens_still(database: Database) -> None:
    token = f"ws_{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(token.encode()).hexdigest()
    with database.write() as session:
        session.add(Token(id=digest[:16], sha256=digest, role="viewer", created_ns=1))
    assert identify(database, token) == AuthenticatedCaller("viewer", None, digest[:16])
    assert identify(database, f"{token}x") is None


def test_it_ends_when_it_expires(database: Database) -> None:
    token = create_token(database, "viewer", lifetime_seconds=60)
    assert identify(database, token) is not None
    shift(database, token, expires_ns=MINUTE)
    assert identify(database, token) is None


def test_it_ends_when_it_is_revoked_and_the_first_time_counts(database: Database) -> None:
    token = create_token(database, "viewer", "vision")
    first = revoke(database, id_of(token), "vision", "ann").token
    assert identify(database, token) is None
    again = revoke(database, id_of(token), None, "bob").token
    assert (again.revoked_ns, again.revoked_by) == (first.revoked_ns, "ann")


def test_it_is_revoked_only_where_it_is(database: Database) -> None:
    token = create_token(database, "viewer", "vision")
    for public, project in ((id_of(token), "language"), ("0" * 16, None), ("", None)):
        with pytest.raises(NotFoundError, match="not found"):
            revoke(database, public, project, "bob")
    assert identify(database, token) is not None


def test_its_use_is_noted_once_a_minute(database: Database) -> None:
    token = create_token(database, "viewer")
    with statements(database) as executed:
        for _ in range(5):
            identify(database, token)
    first = row_of(database, token).last_used_ns
    assert first is not None
    assert len([statement for statement in executed if statement.startswith("UPDATE")]) == 1
    shift(database, token, last_used_ns=MINUTE)
    identify(database, token)
    assert (row_of(database, token).last_used_ns or 0) > first - MINUTE


@pytest.mark.parametrize("name", ["two\nlines", "x" * 129, "\x1b[31m"])
def test_a_name_is_a_line_of_text(sqlite: Database, name: str) -> None:
    with pytest.raises(ConfigError, match="not a line of text"):
        create_token(sqlite, "viewer", name=name)


def test_a_project_has_a_name(sqlite: Database) -> None:
    with pytest.raises(BadNameError):
        create_token(sqlite, "viewer", "../other")


requests = st.builds(
    TokenRequest,
    role=st.sampled_from(ROLES),
    project=st.sampled_from([None, "vision", "language"]),
    name=st.just("made"),
    lifetime_seconds=st.sampled_from([None, 60, 10_000]),
)


@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(mine=requests, requested=requests)
def test_nobody_makes_a_token_that_may_more(
    sqlite: Database, mine: TokenRequest, requested: TokenRequest
) -> None:
    lifetime = mine.lifetime_seconds
    # Of equal lifetimes the later token expires later, unless both are made at one tick of the clock.
    assume(lifetime is None or requested.lifetime_seconds != lifetime)
    maker = identify(sqlite, create_token(sqlite, mine.role, mine.project, lifetime_seconds=lifetime))
    assert maker is not None
    fits = (
        PERMISSIONS[requested.role] <= PERMISSIONS[mine.role]
        and mine.project in {None, requested.project}
        and (
            lifetime is None
            or (requested.lifetime_seconds is not None and requested.lifetime_seconds < lifetime)
        )
    )
    if not fits:
        with pytest.raises(TooMuchError):
            create_for(sqlite, requested, maker)
        return
    caller = identify(sqlite, create_for(sqlite, requested, maker))
    assert caller is not None
    assert (caller.role, caller.project) == (requested.role, requested.project)
    with sqlite.read() as session:
        assert (
            session.execute(select(Token.created_by).where(Token.id == caller.token)).scalar_one()
            == maker.who
        )


@pytest.fixture
def postgresql(postgres: Postgres) -> Iterator[Database]:
    with postgres.new_database() as url:
        postgresql = open_database(url)
        upgrade(postgresql)
        yield postgresql
        postgresql.close()


@pytest.fixture
def maker(postgresql: Database, tmp_path: Path) -> AuthenticatedCaller:
    """An operator that has registered the run."""
    (tmp_path / "store").mkdir()
    driven = Driven(make_service(postgresql, Store.open(tmp_path / "store")))
    token = create_token(postgresql, "operator", "vision")
    register(driven.service, "vision", "mine", (), "operator", RunOrigin(registered_by=id_of(token)))
    caller = identify(postgresql, token)
    assert caller is not None
    return caller


def until_it_waits(postgresql: Database, done: Future[Any]) -> None:
    def waits() -> bool:
        with postgresql.engine.connect() as connection:
            return bool(connection.execute(sa.text(WAITING)).scalar_one())

    eventually(lambda: waits() or done.done(), 60)
    assert not done.done()


def test_none_is_made_once_the_maker_is_revoked(postgresql: Database, maker: AuthenticatedCaller) -> None:
    with ThreadPoolExecutor(1) as threads:
        with postgresql.write() as session:
            row = session.execute(select_for_update(maker)).scalar_one()
            row.revoked_ns = read_clock(session)
            session.flush()
            making = threads.submit(create_for_run, postgresql, ASKED, maker)
            until_it_waits(postgresql, making)
        with pytest.raises(TooMuchError, match="no longer valid"):
            making.result(60)


def test_one_that_was_being_made_is_revoked_with_its_maker(
    postgresql: Database, maker: AuthenticatedCaller
) -> None:
    with ThreadPoolExecutor(1) as threads:
        with postgresql.write() as session:
            session.execute(select_for_update(maker, read=True)).scalar_one()
            run_id = session.execute(sa.select(RunRow.id)).scalar_one()
            made = Token(role="recorder", project="vision", run_id=run_id, maker=maker.token, created_by="")
            token = add_token(session, made, 3600)
            session.flush()
            revoking = threads.submit(revoke, postgresql, maker.token, None, "ann")
            until_it_waits(postgresql, revoking)
        assert revoking.result(60).run_tokens == (id_of(token),)
    assert identify(postgresql, token) is None


def select_for_update(maker: AuthenticatedCaller, *, read: bool = False) -> sa.Select[Any]:
    return sa.select(Token).where(Token.id == maker.token).with_for_update(read=read)
