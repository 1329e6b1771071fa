"""The first token of a service, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.services.postgres import Postgres
from watchstep.errors import BadNameError, ConfigError
from watchstep_services.cli.app import app
from watchstep_services.database.engine import Database, open_database
from watchstep_services.tokens import Identity, identify


def created(*arguments: str) -> str:
    """The token that the command prints, and nothing else on its standard output."""
    done = CliRunner().invoke(app, ["tokens", "create", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (token,) = done.stdout.splitlines()
    return token


def test_a_token_of_every_project(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    url = database.engine.url.render_as_string(hide_password=False)
    monkeypatch.setenv("WATCHSTEP_DATABASE_URL", url)
    assert identify(database, created("--role", "operator")) == Identity("operator", None)


def test_a_token_of_one_project(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_DATABASE_URL", str(sqlite.engine.url))
    token = created("--role", "recorder", "--project", "vision")
    assert identify(sqlite, token) == Identity("recorder", "vision")


def test_the_first_process_may_be_this_one(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres.new_database() as url:
        monkeypatch.setenv("WATCHSTEP_DATABASE_URL", url)
        token = created("--role", "viewer")
        database = open_database(url)
        assert identify(database, token) == Identity("viewer", None)
        database.close()


def test_the_password_is_not_shown(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres.new_database() as url:
        monkeypatch.setenv("WATCHSTEP_DATABASE_URL", url.replace("postgres:@", "postgres:hunter2@"))
        done = CliRunner().invoke(app, ["tokens", "create", "--role", "viewer"], catch_exceptions=False)
        assert "postgres:***@" in done.stderr
        assert "hunter2" not in done.output


def test_no_token_of_a_service_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError, match="no such file"):
        created("--role", "operator")
    assert not (tmp_path / "home" / "watchstep.sqlite").exists()


def test_a_project_that_is_no_name(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_DATABASE_URL", str(sqlite.engine.url))
    with pytest.raises(BadNameError):
        created("--role", "recorder", "--project", "../other")


def test_an_unknown_role() -> None:
    done = CliRunner().invoke(app, ["tokens", "create", "--role", "king"])
    assert done.exit_code == 2
    assert "viewer, recorder, operator" in done.stderr
