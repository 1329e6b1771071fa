"""``watchstep tokens``: who may use a service's API. Works on its database, so that the first token needs no other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from watchstep.errors import ConfigError
from watchstep_services.database.engine import Database, open_database
from watchstep_services.database.schema import upgrade
from watchstep_services.settings import load_settings
from watchstep_services.tokens import PERMISSIONS, Role, create_token

app = typer.Typer(help="Tokens for the API.", no_args_is_help=True)


@app.command("create")
def create(
    role: Annotated[str, typer.Option(help=f"What it may do: {', '.join(PERMISSIONS)}.")],
    project: Annotated[str | None, typer.Option(help="The only project that it is for; else all.")] = None,
) -> None:
    """Make a token for the service of WATCHSTEP_DATABASE_URL or WATCHSTEP_HOME; it is printed once."""
    if role not in PERMISSIONS:
        raise typer.BadParameter(f"use one of {', '.join(PERMISSIONS)}", param_hint="--role")
    database = open_database(load_settings().resolved_database_url)
    try:
        _check(database)
        upgrade(database)
        token = create_token(database, cast("Role", role), project)
    finally:
        database.close()
    reach = "every project" if project is None else f"project {project}"
    shown = database.engine.url.render_as_string(hide_password=True)
    typer.echo(f"{role} of {reach} in {shown}; the token is shown once:", err=True)
    typer.echo(token)


def _check(database: Database) -> None:
    """Refuse a database that does not answer, and a SQLite file that no service has made: it would open nothing."""
    path = database.engine.url.database
    if database.engine.dialect.name == "sqlite" and path and not Path(path).is_file():
        raise ConfigError(
            f"database {path}: no such file",
            "name the service's in WATCHSTEP_DATABASE_URL, or its home in WATCHSTEP_HOME",
        )
    database.check()
