"""Tokens on the command line, in the database and through the API."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests.services.driving import Driven, make_service
from tests.services.postgres import Postgres
from tests.services.recording import PROJECT
from watchstep.errors import ConfigError, NotFoundError, ServiceError
from watchstep.store.store import Store
from watchstep_services.auth import create_token, id_of, identify
from watchstep_services.cli.main import app
from watchstep_services.core.settings import load_settings
from watchstep_services.db.engine import Database, open_database
from watchstep_services.serve.embedded import EmbeddedService


def created(*arguments: str) -> str:
    """The token that the command prints, and nothing else on its standard output."""
    done = CliRunner().invoke(app, ["tokens", "create", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (token,) = done.stdout.splitlines()
    return token


def seen(database: Database, token: str) -> tuple[str, str | None] | None:
    found = identify(database, token)
    return None if found is None else (found.role, found.project)


def tokens(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["tokens", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_store_selects_its_service(tmp_path: Path) -> None:
    store = tmp_path / "runs"
    with EmbeddedService(load_settings(store=str(store), home=store / ".watchstep")) as service:
        token = created("--role", "viewer", "--store", str(store))
        assert seen(service.database, token) == ("viewer", None)
        listed = tokens("list", "--store", str(store))
        assert id_of(token) in listed
        assert "revoked" in tokens("revoke", id_of(token), "--store", str(store))
        assert seen(service.database, token) is None
    with pytest.raises(ConfigError, match="no such file") as refused:
        tokens("list", "--store", str(tmp_path / "other"))
    assert "--store" in refused.value.hint


@pytest.mark.ci
def test_ids_stay_whole_in_a_narrow_terminal(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_DATABASE_URL", str(sqlite.engine.url))
    for made in range(3):
        create_token(
            sqlite, "viewer", "a-project-with-a-rather-long-name", name=f"screen [{made}] in the hall"
        )
    names = {row["id"]: row["name"] for row in json.loads(tokens("list", "--json"))}
    monkeypatch.setenv("COLUMNS", "40")
    for width, forced in (("40", "1"), ("100", "")):
        monkeypatch.setenv("COLUMNS", width)
        monkeypatch.setenv("FORCE_COLOR", forced)
        listed = tokens("list").splitlines()
        assert sorted(names.values()) == [f"screen [{number}] in the hall" for number in range(3)]
        for token_id, name in names.items():
            (line,) = [line for line in listed if token_id in line]
            assert name in line


@pytest.mark.ci
def test_the_first_token_may_precede_the_service_and_no_password_is_shown(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgres.new_database() as url:
        monkeypatch.setenv("WATCHSTEP_DATABASE_URL", url.replace("postgres:@", "postgres:hunter2@"))
        done = CliRunner().invoke(app, ["tokens", "create", "--role", "viewer"], catch_exceptions=False)
        database = open_database(url)
        assert seen(database, done.stdout.strip()) == ("viewer", None)
        database.close()
        assert "postgres:***@" in done.stderr
        assert "hunter2" not in done.output


def test_no_token_is_created_for_a_missing_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError, match="no such file"):
        created("--role", "operator")
    assert not (tmp_path / "home" / "watchstep.sqlite").exists()


def test_an_unknown_role() -> None:
    done = CliRunner().invoke(app, ["tokens", "create", "--role", "king"])
    assert done.exit_code == 2
    assert "viewer, recorder, operator, admin" in done.stderr


def test_tokens_are_listed_and_revoked(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_DATABASE_URL", database.engine.url.render_as_string(hide_password=False))
    first = created("--role", "recorder", "--project", "vision", "--name", "cluster a", "--expires-in", "90d")
    second = created("--role", "admin")
    assert (seen(database, first), seen(database, second)) == (("recorder", "vision"), ("admin", None))
    (row,) = json.loads(tokens("list", "--project", "vision", "--json"))
    assert (row["id"], row["name"], row["state"], row["created_by"]) == (
        id_of(first),
        "cluster a",
        "active",
        "command line",
    )
    assert row["expires_ns"] - row["created_ns"] == 90 * 86_400 * 10**9
    printed = tokens("list")
    for token in (first, second):
        assert id_of(token) in printed
        assert token.split("_", 2)[2] not in printed
    assert tokens("revoke", id_of(first)) == f"token {id_of(first)} is revoked\n"
    assert tokens("revoke", second) == f"token {id_of(second)} is revoked\n"
    assert seen(database, first) is None
    assert seen(database, second) is None
    assert {held["state"] for held in json.loads(tokens("list", "--json"))} == {"revoked"}


def test_a_missing_token_is_reported(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_DATABASE_URL", str(sqlite.engine.url))
    with pytest.raises(NotFoundError, match="not found"):
        tokens("revoke", "0123456789abcdef")


@pytest.mark.parametrize("expires", ["0d", "90", "1y", "-3d", "99999999d"])
def test_an_invalid_lifetime(expires: str) -> None:
    done = CliRunner().invoke(app, ["tokens", "create", "--role", "viewer", "--expires-in", expires])
    assert done.exit_code == 2
    assert "90d" in done.stderr


@pytest.mark.ci
def test_tokens_through_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedService(load_settings(home=tmp_path / "home", store=str(tmp_path / "runs"))) as service:
        monkeypatch.setenv("WATCHSTEP_TOKEN", create_token(service.database, "admin", "vision"))
        there = ("--service", service.url, "--project", "vision")
        token = created("--role", "viewer", "--name", "ann", *there)
        assert seen(service.database, token) == ("viewer", "vision")
        rows = json.loads(tokens("list", "--json", *there))
        assert [row["name"] for row in rows if row["id"] == id_of(token)] == ["ann"]
        tokens("revoke", token, *there)
        assert seen(service.database, token) is None
        with pytest.raises(ServiceError, match="belongs to project"):
            tokens("list", "--service", service.url)


def test_a_token_of_one_run(database: Database, folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_DATABASE_URL", database.engine.url.render_as_string(hide_password=False))
    Driven(make_service(database, folder_store)).register("r1")
    there = ("--project", PROJECT, "--run", "r1")
    token = created(*there, "--expires-in", "30d")
    found = identify(database, token)
    assert found is not None
    assert (found.role, found.project, found.run) == ("recorder", PROJECT, "r1")
    created("--role", "recorder", "--project", PROJECT)
    (row,) = json.loads(tokens("list", *there, "--json"))
    assert (row["id"], row["run"], row["name"]) == (id_of(token), "r1", "run r1")
    assert row["expires_ns"] - row["created_ns"] == 30 * 86_400 * 10**9
    assert f"{PROJECT}/r1" in tokens("list")
    tokens("revoke", token, *there)
    assert identify(database, token) is None
    with pytest.raises(NotFoundError, match="not found"):
        created("--project", PROJECT, "--run", "r2")
    with pytest.raises(ConfigError, match="lifetime"):
        created(*there, "--expires-in", "400d")


def test_a_token_of_one_run_has_the_role_recorder() -> None:
    done = CliRunner().invoke(app, ["tokens", "create", "--role", "operator", "--run", "r1"])
    assert (done.exit_code, "recorder" in done.stderr) == (2, True)


@pytest.mark.ci
def test_an_operator_creates_a_token_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedService(load_settings(home=tmp_path / "home", store=str(tmp_path / "runs"))) as service:
        operator = create_token(service.database, "operator", "vision")
        monkeypatch.setenv("WATCHSTEP_TOKEN", operator)
        httpx.post(
            f"{service.url}/v1/projects/vision/runs", json={"run": "r1"}, headers={"authorization": f"Bearer {operator}"}, timeout=60
        ).raise_for_status()  # fmt: skip
        there = ("--service", service.url, "--project", "vision", "--run", "r1")
        first, second = created(*there), created(*there, "--name", "ann's")
        assert [row["name"] for row in json.loads(tokens("list", "--json", *there))] == ["ann's", "created by command line"]  # fmt: skip
        assert "is revoked" in tokens("revoke", first, *there)
        with pytest.raises(ServiceError, match="lifetime_seconds"):
            created(*there, "--expires-in", "400d")
        monkeypatch.setenv("WATCHSTEP_TOKEN", create_token(service.database, "admin"))
        kept = tokens("revoke", operator, "--keep-created", "--service", service.url)
        assert kept == f"token {id_of(operator)} is revoked\n"
        assert seen(service.database, second) == ("recorder", "vision")
        gone = tokens("revoke", operator, "--service", service.url)
        assert gone == f"token {id_of(operator)} is revoked; run tokens revoked with it: 1\n"
        assert seen(service.database, second) is None
